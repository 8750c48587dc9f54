"""`functionalize.plan`: the memory and time of a step, planned at every point of a grid of settings."""
