"""The state around a step: the objects it can reach, the places of its tensors, guards, and its side effects."""
