"""Helpers for every folder: the user's stack, argument structures, text, temporary patches, the garbage collector."""
