"""The autograd nodes of a recorded step: which op made each of them, and which ops each of them ran."""
