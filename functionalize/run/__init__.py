"""Runners: what executes a program's graph."""
