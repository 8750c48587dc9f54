"""FSDP2 on real gloo ranks."""
