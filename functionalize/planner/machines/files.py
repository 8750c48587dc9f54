"""Machines as JSON files: what `functionalize calibrate` writes and `--machine file.json` reads.

    write_machine("here.json", machine)
    read_machine("here.json") == machine
    machine_of("h100"), machine_of("here.json"), machine_of(machine)

The file has the numbers of a `Machine` under their names: rates by dtype, curves as points, and `format`, which tells
it from other files. Refuses (`PlanError`): a file that cannot be read, is no such JSON, is of another format, or whose
numbers are no machine; the message names the file and the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from functionalize.cost.machines.efficiency import Curve, Efficiency, Host
from functionalize.cost.machines.machine import Algorithm, DeviceMemory, Machine
from functionalize.cost.machines.presets import MACHINE_OF, MACHINES
from functionalize.errors import PlanError, SaveError

FORMAT = "functionalize machine 1"
_NUMBERS = ("flops", "memory_bandwidth", "link_bandwidth", "latency", "overhead")
_RATES = ("host_bandwidth", "internode_bandwidth", "oversubscription", "host_memory_bandwidth")
_COUNTS = ("ranks_per_node", "memory", "rails", "ranks_per_pod")


def machine_of(machine: Any, target: str = "cuda") -> Machine:
    """The machine of a name or of a file of `calibrate`, or itself; None: that of the target. Raises `PlanError`."""
    chosen = machine if machine is not None else MACHINE_OF[target]
    if isinstance(chosen, Machine):
        return chosen
    if str(chosen) in MACHINES:  # 4090 is a number where a grid is read
        return MACHINES[str(chosen)]
    if not isinstance(chosen, str):
        raise PlanError(f"a machine is a name or a `Machine`, not {chosen!r}")
    if chosen.endswith(".json"):
        return read_machine(chosen)
    raise PlanError(
        f"no machine `{chosen}`; there are {', '.join(sorted(MACHINES))}, and files of `calibrate`, which end in .json"
    )


def write_machine(path: str | Path, machine: Machine) -> None:
    """Write a machine. Raises `SaveError` if the file cannot be written."""
    content = {"format": FORMAT, **_plain(machine)}
    try:
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SaveError(f"{path} cannot be written: {error.strerror}") from error


def read_machine(path: str | Path) -> Machine:
    """Read a machine that `write_machine` wrote. Raises `PlanError`."""
    content = read_json(path, PlanError)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanError(
            f"{path} is no machine: its `format` is not {FORMAT!r}; `functionalize calibrate` writes such files"
        )
    known = {"format", *(field.name for field in fields(Machine))}
    if unknown := sorted(content.keys() - known):
        raise PlanError(f"{path} is no machine: it has an unknown field `{unknown[0]}`")
    try:
        return _machine(content)
    except KeyError as error:
        raise PlanError(f"{path} is no machine: it has no field `{error.args[0]}`") from error
    except (TypeError, ValueError, AttributeError, PlanError) as error:
        raise PlanError(f"{path} is no machine: {error}") from error


def read_json(path: str | Path, kind: type[Exception]) -> Any:
    """The content of a file. Raises an error of that kind for a file that cannot be read or is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise kind(f"{path} is no JSON: {error}") from error


def _plain(machine: Machine) -> dict[str, Any]:
    efficiency = machine.efficiency
    found: dict[str, Any] = {
        field.name: getattr(machine, field.name)
        for field in fields(Machine)
        if field.name not in ("matrix_flops", "outside", "efficiency", "host", "algorithms")
    }
    for name in _RATES:
        found[name] = found[name] if math.isfinite(found[name] or 0.0) else None
    return {
        **found,
        "matrix_flops": {str(dtype).removeprefix("torch."): n for dtype, n in machine.matrix_flops},
        "outside": None if machine.outside is None else machine.outside._asdict(),
        "host": None if machine.host is None else machine.host._asdict(),
        "algorithms": [each._asdict() for each in machine.algorithms],
        "efficiency": {
            "about": efficiency.about,
            "curves": {
                kind: {"points": c.points, "low": c.low, "high": c.high, "source": c.source}
                for kind, c in efficiency.curves
            },
        },
    }


def _machine(content: Mapping[str, Any]) -> Machine:
    numbers: dict[str, Any] = {name: _positive(name, content[name]) for name in _NUMBERS}
    rates: dict[str, Any] = {
        name: _positive(name, content[name]) for name in _RATES if content.get(name) is not None
    }
    counts: dict[str, Any] = {
        name: int(_positive(name, content[name], 1))
        for name in _COUNTS
        if content.get(name) is not None
    }
    capability, attention = content.get("capability"), content.get("attention")
    if capability is not None and not (
        isinstance(capability, list)
        and [type(each) for each in capability] == [int, int]
        and min(capability) >= 0
    ):
        raise PlanError(f"`capability` is two whole numbers, as [9, 0], not {capability!r}")
    streams, efficiency = content.get("streams", True), content.get("efficiency") or {}
    if not isinstance(streams, bool):
        raise PlanError(f"`streams` is true or false, not {streams!r}")
    if attention is not None and not isinstance(attention, str):
        raise PlanError(f"`attention` is the name of a kernel, not {attention!r}")
    return Machine(
        **numbers,
        **rates,
        **counts,
        matrix_flops=tuple(
            (_dtype(name), _positive(name, rate))
            for name, rate in (content.get("matrix_flops") or {}).items()
        ),
        streams=streams,
        capability=None if capability is None else (capability[0], capability[1]),
        attention=attention,
        outside=_record(DeviceMemory, "outside", content.get("outside")),
        host=_record(Host, "host", content.get("host")),
        algorithms=tuple(
            _record(Algorithm, "algorithms", each or {}) for each in content.get("algorithms") or ()
        ),
        efficiency=Efficiency(
            tuple((kind, _curve(each)) for kind, each in (efficiency.get("curves") or {}).items()),
            str(efficiency.get("about", "")),
        ),
    )


def _curve(found: Mapping[str, Any]) -> Curve:
    points = tuple((float(size), float(share)) for size, share in found["points"])
    low, high = float(found.get("low", 1)), float(found.get("high", 1))
    return Curve(points, low, high, str(found.get("source", "")))


def _record(kind: Any, name: str, found: Any) -> Any:
    """A named tuple of numbers that are not below 0, and of flags; None as it is."""
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise PlanError(f"`{name}` has numbers by name, and this is {found!r}")
    made = kind(**found)
    for field, value in made._asdict().items():
        if field == "tree" and isinstance(value, bool):
            continue
        least = math.ulp(0) if field == "share" else 0.0
        _positive(f"{name}.{field}", value, least)
    return made


def _positive(name: str, value: Any, least: float | None = None) -> float:
    if least is None:
        least = 0.0 if name in ("latency", "overhead") else math.ulp(0)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:
        wanted = "a number that is not below 0" if not least else f"a number of at least {least:g}"
        wanted = "a number above 0" if least == math.ulp(0) else wanted
        raise PlanError(f"`{name}` is {wanted}, not {value!r}")
    return float(value)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PlanError(f"there is no dtype `{name}`")
    return found
