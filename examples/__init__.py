"""Small programs that resize, mutate and alias storages, and tools to compare runs of them."""
