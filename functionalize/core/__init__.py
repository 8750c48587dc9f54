"""The machine: storages as values. Imports no front end, no runner and no pass."""
