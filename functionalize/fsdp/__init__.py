"""All that knows FSDP2: its objects, the table of its attributes, its Python state, the releases it was tested on."""
