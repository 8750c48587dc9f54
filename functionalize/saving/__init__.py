"""How a captured step is written: live objects by name, guards and sources as records, what must match to load it."""
