"""A fake process group of any size, and the device that is planned for, on fake tensors."""
