"""Live numbers: what Python computes from tensors and hyperparameters, recorded and computed again by a replay."""
