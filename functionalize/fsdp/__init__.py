"""Everything about FSDP2: its objects, a table of its attributes, its Python state, the tested releases of torch."""
