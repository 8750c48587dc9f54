"""Audits: calls of a captured step that run for real and are compared with the program that would have run."""
