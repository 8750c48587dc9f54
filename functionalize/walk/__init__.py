"""The walk over the Python objects that a step can reach, and what each of them consists of."""
