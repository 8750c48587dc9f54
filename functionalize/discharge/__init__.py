"""From ops on storages to values: `FunctionalStorage`, the engine, and the rules of ops."""
