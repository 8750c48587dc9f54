"""Functions: traced, functionalized for `aot_function`, compiled."""
