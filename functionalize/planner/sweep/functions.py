"""The functions of a script, which of them receives which key of a point, and their calls.

    functions = StepFunctions.of(["layers", "batch"], build, inputs, step)
    functions.keys["build"]                            {"layers"}: the keyword arguments that `build` accepts
    built = functions.built(point)                     with resharding and checkpointing, if the plan has these keys
    made, args, kwargs = functions.call(built, point)  the result of `inputs`; the arguments of `step`

Refuses (`PlanError`): a key that no function accepts, arguments that do not fit a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functionalize.errors import PlanError
from functionalize.planner.sweep.changes import change
from functionalize.planner.sweep.grid import MODEL_KEYS, PROGRAM_KEYS, WORLD_KEYS, Point, of


@dataclass(frozen=True)
class StepFunctions:
    """The functions of a script. keys: name of a function -> the keys of points that it accepts by name."""

    build: Callable[..., Any]
    inputs: Callable[..., Any] | None
    step: Callable[..., Any]
    keys: Mapping[str, frozenset[str]]

    @staticmethod
    def of(
        keys: Sequence[str],
        build: Callable[..., Any],
        inputs: Callable[..., Any] | None,
        step: Callable[..., Any],
    ) -> StepFunctions:
        """Raises `PlanError` for a key that neither a function nor the plan itself accepts."""
        named = [key for key in keys if key not in (*WORLD_KEYS, *PROGRAM_KEYS)]
        every = {"build": build, "inputs": inputs, "step": step}
        accepted = {name: _accepted(function, named) for name, function in every.items()}
        known = frozenset(MODEL_KEYS).union(*accepted.values())
        unused = [key for key in named if key not in known]
        if unused:
            own = ", ".join((*WORLD_KEYS, *MODEL_KEYS, *PROGRAM_KEYS))
            raise PlanError(
                f"no function accepts `{unused[0]}`: give `build`, `inputs` or `step` a parameter of that name "
                f"(the plan itself accepts {own})"
            )
        return StepFunctions(build, inputs, step, accepted)

    def of_model(self, point: Point) -> dict[str, Any]:
        """The keys on which the model depends, besides those of its world."""
        return {key: point[key] for key in point if key in self.keys["build"] or key in MODEL_KEYS}

    @property
    def changing(self) -> list[str]:
        """The keys by which the plan changes a model, as `build` has no parameters of these names."""
        return [key for key in MODEL_KEYS if key not in self.keys["build"]]

    def built(self, point: Point) -> Any:
        """What `build` returns, changed by the keys of the plan."""
        kwargs = of(point, self.keys["build"])
        _check_call("build", self.build, (), kwargs)
        built = self.build(**kwargs)
        change(built, **of(point, self.changing))
        return built

    def call(self, built: Any, point: Point) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(what `inputs` returns, the arguments of `step`, its keyword arguments)."""
        made: Any = ()
        if self.inputs is not None:
            own = of(point, self.keys["inputs"])
            _check_call("inputs", self.inputs, (), own)
            made = self.inputs(**own)
        args, kwargs = _arguments(built, made)
        kwargs |= of(point, self.keys["step"])
        _check_call("step", self.step, args, kwargs)
        return made, args, kwargs


def _accepted(fn: Callable[..., Any] | None, keys: Sequence[str]) -> frozenset[str]:
    if fn is None:
        return frozenset()
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(keys)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return frozenset(key for key in keys if key in named)


def _arguments(built: Any, made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the step. A tuple is spread, a dict becomes keyword arguments, any other object is one argument.

    built: the result of `build`. made: the result of `inputs`.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in (built, made):
        if isinstance(each, tuple):
            args += each
        elif isinstance(each, dict):
            kwargs |= each
        else:
            args.append(each)
    return tuple(args), kwargs


def _check_call(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raises `PlanError` for arguments that do not fit the signature of a user's function."""
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **kwargs)
    except ValueError:  # a builtin may have no signature
        pass
    except TypeError as error:
        results = "the results of `build` and `inputs`, and " if name == "step" else ""
        raise PlanError(
            f"`{name}({', '.join(signature.parameters)})` cannot be called: {error}. Its arguments are {results}the "
            "keys of the plan that it has as parameters"
        ) from None
