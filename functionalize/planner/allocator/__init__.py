"""The CUDA caching allocator, simulated."""
