"""What kernels allocate inside themselves."""
