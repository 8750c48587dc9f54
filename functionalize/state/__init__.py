"""The state around a step: what its code reaches, where tensors live, what guards compare, what it changes."""
