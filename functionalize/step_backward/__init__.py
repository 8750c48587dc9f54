"""A captured forward with the backward that autograd runs for it; the backward of a graph that eager has built."""
