"""The report on a step's memory: figures, text, rows."""
