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

from functionalize.errors import PlanError, SaveError
from functionalize.planning.machines.efficiency import Curve, Efficiency, Host
from functionalize.planning.machines.machine import Algorithm, DeviceMemory, Machine
from functionalize.planning.machines.presets import MACHINE_OF, MACHINES

FORMAT = "functionalize machine 1"
_NUMBERS = ("flops", "memory_bandwidth", "link_bandwidth", "latency", "overhead")
_RATES = ("host_bandwidth", "internode_bandwidth", "oversubscription")
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
        found[name] = found[name] if math.isfinite(found[name]) else None
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
        name: int(_positive(name, content[name])) for name in _COUNTS if content.get(name)
    }
    capability, outside = content.get("capability"), content.get("outside")
    efficiency, host = content.get("efficiency") or {}, content.get("host")
    return Machine(
        **numbers,
        **rates,
        **counts,
        matrix_flops=tuple(
            (_dtype(name), _positive(name, rate))
            for name, rate in (content.get("matrix_flops") or {}).items()
        ),
        streams=bool(content.get("streams", True)),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        attention=content.get("attention"),
        outside=None if outside is None else DeviceMemory(**outside),
        host=None if host is None else Host(**host),
        algorithms=tuple(Algorithm(**each) for each in content.get("algorithms") or ()),
        efficiency=Efficiency(
            tuple((kind, _curve(each)) for kind, each in (efficiency.get("curves") or {}).items()),
            str(efficiency.get("about", "")),
        ),
    )


def _curve(found: Mapping[str, Any]) -> Curve:
    points = tuple((float(size), float(share)) for size, share in found["points"])
    low, high = float(found.get("low", 1)), float(found.get("high", 1))
    return Curve(points, low, high, str(found.get("source", "")))


def _positive(name: str, value: Any) -> float:
    least = 0.0 if name in ("latency", "overhead") else math.ulp(0)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not least <= value < math.inf
    ):
        raise PlanError(f"`{name}` is a number above 0, not {value!r}")
    return float(value)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PlanError(f"there is no dtype `{name}`")
    return found
