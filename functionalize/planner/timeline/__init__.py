"""Which bytes are alive at which op, and in which category."""
