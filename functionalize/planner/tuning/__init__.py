"""`fz.tune`: the fastest configuration of a step that fits in a device, as code."""
