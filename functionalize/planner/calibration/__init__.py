"""Measures the machine that it runs on: how much of its peaks kernels reach, and what the host adds."""
