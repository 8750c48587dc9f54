"""Where a Python module or a file of code comes from: the standard library, an installed package, or the user."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

_STDLIB = sysconfig.get_path("stdlib") + os.sep


@functools.lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Whether a Python module is the user's: not of the standard library, not installed, not this package."""
    if module is not None and type(module) is not str:  # a class may have a descriptor there
        return False
    package = (module or "").partition(".")[0]
    return (
        not is_standard(package)
        and package not in ("torch", "functionalize")
        and not is_installed(module)
    )


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a Python module belongs to an installed package and is not the user's own code."""
    return is_installed_file(getattr(sys.modules.get(module or ""), "__file__", None) or "")


def is_installed_file(file: str) -> bool:
    """Whether a file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


def is_standard_file(file: str) -> bool:
    """Whether a file belongs to Python's standard library."""
    return file.startswith(_STDLIB) and not is_installed_file(file)


def is_standard(package: str) -> bool:
    """Whether a package belongs to Python's standard library."""
    return package in sys.stdlib_module_names and package != "__main__"


def home_of(module: str) -> str:
    """The name by which other processes know a module: a script is `__main__` here, `__mp_main__` in processes that
    it spawns, and has its own name where it is imported."""
    if module not in ("__main__", "__mp_main__"):
        return module
    found = sys.modules.get(module)
    spec = getattr(found, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return str(spec.name)
    file = getattr(found, "__file__", None)
    if not file:  # an interactive session
        return "__main__"
    return os.path.splitext(os.path.basename(file))[0]
