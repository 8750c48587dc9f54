"""The annotations of a class or a function, as far as they can be evaluated, without its bases'.

Up to Python 3.13 they were evaluated when it was defined. Since then a function of its own evaluates them when somebody
asks; a name that is imported for type checkers only is a `ForwardRef`. To ask here leaves no trace in the object.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def annotations_of(value: Any) -> Mapping[str, Any]:
    """Types, or texts, by the names of attributes or parameters."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(value, format=annotationlib.Format.FORWARDREF)
    if isinstance(value, type):
        found: Mapping[str, Any] = vars(value).get("__annotations__", {})
        return found
    of_function: Mapping[str, Any] = value.__annotations__
    return of_function
