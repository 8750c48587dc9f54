"""The state around a step: sources and slots of its tensors, guards, its arguments."""
