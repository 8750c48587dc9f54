"""Calls of a step that every replay makes again after its graph: `print`, logging, progress bars, schedulers."""
