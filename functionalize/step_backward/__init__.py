"""A captured forward with the backward that autograd runs for it."""
