"""Machines in files, and the memory of a device that torch's allocator does not see."""
