"""What kernels of GPUs allocate inside themselves."""
