"""What passes and planning look up in a graph: aliases, dead code, in-place forms, the two sides of a joint graph."""
