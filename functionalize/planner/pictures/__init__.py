"""Pictures, the interactive page and the trace of a report."""
