"""Names of a package that are imported when they are first used: the package imports neither torch nor a framework.

    __getattr__, __dir__ = late_names(__name__, {"trace": "functionalize.functions.transforms"}, ("errors",))

Type checkers do not see this: the package imports the same names below `if TYPE_CHECKING:`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping

from functionalize.util.gc_pause import only_young_collections


def late_names(
    package: str, modules: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package. modules: of each name, the module that has it."""

    def __getattr__(name: str) -> object:
        if name not in modules and name not in submodules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with only_young_collections():  # a third of the time of an import, torch's own among them
            if name in submodules:
                return importlib.import_module(f"{package}.{name}")
            found: object = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *submodules})

    return __getattr__, __dir__
