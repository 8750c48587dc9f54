"""A module that steps import when they run, or whose functions they call."""

SCALE = 1.0


def by_globals() -> float:
    """Here, and not among the cases, since every object that a module names then counts."""
    return globals()["SCALE"]  # type: ignore[no-any-return]


def by_eval() -> float:
    return eval("SCALE")  # type: ignore[no-any-return]
