"""Calls of sizes that were not recorded: programs predicted for them, and what must hold before one is replayed."""
