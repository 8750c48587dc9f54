"""What a machine without a GPU can only predict, measured on one GPU: see `__main__.py` for the command."""
