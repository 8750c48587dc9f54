"""A module that steps import when they run."""

SCALE = 1.0
