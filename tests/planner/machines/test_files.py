"""Machines as files: what is written is read again; every wrong file is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from functionalize.cost.machines.efficiency import Host
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import PlanError, SaveError
from functionalize.planner.machines.files import machine_of, read_machine, write_machine


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    machine = replace(MACHINES[name], host=Host(*(i / 1e6 for i in range(8))), ranks_per_pod=64)
    write_machine(tmp_path / "own.json", machine)
    assert read_machine(tmp_path / "own.json") == machine
    assert machine_of(str(tmp_path / "own.json")) == machine


def refusal(path: Path) -> str:
    with pytest.raises(PlanError) as error:
        machine_of(str(path))
    return str(error.value).replace(str(path), "own.json")


def changed(path: Path, **changes: Any) -> str:
    write_machine(path, MACHINES["h100"])
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "left out"}))
    return refusal(path)


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    assert refusal(path) == "own.json cannot be read: No such file or directory"
    path.write_text("{")
    assert refusal(path).startswith("own.json is no JSON: ")
    path.write_text("[1, 2]")
    assert "`functionalize calibrate` writes such files" in refusal(path)
    assert "its `format` is not" in changed(path, format="functionalize machine 0")
    assert changed(path, flop=1) == "own.json is no machine: it has an unknown field `flop`"
    assert changed(path, flops="left out") == "own.json is no machine: it has no field `flops`"
    for wrong in ("fast", 0, -1, True, None):
        text = f"own.json is no machine: `memory_bandwidth` is a number above 0, not {wrong!r}"
        assert changed(path, memory_bandwidth=wrong) == text
    assert "no dtype `float17`" in changed(path, matrix_flops={"float17": 1.0})
    assert "own.json is no machine" in changed(path, matrix_flops=[1])
    curve = {"points": [[1, 0.5], [0.5, 0.5]]}
    assert "ascend" in changed(path, efficiency={"curves": {"matmul": curve}})
    assert "no kind of kernel `mamtul`" in changed(
        path, efficiency={"curves": {"mamtul": {"points": [[1, 1]]}}}
    )
    assert "own.json is no machine" in changed(path, host={"forwards": 1.0})
    outside = {"context": -1, "communicator": 0, "workspace": 0}
    algorithm = {"base": 0.0, "hop": 0.0, "network_hop": 0.0, "share": 0}
    for field, wrong, message in (
        ("host", {"node": "slow"}, "`host.node` is a number that is not below 0, not 'slow'"),
        ("host", 3, "`host` has numbers by name, and this is 3"),
        ("outside", outside, "`outside.context` is a number that is not below 0, not -1"),
        ("algorithms", [algorithm], "`algorithms.share` is a number above 0, not 0"),
        ("algorithms", [None], "missing 3 required positional arguments"),
        ("ranks_per_node", 0, "`ranks_per_node` is a number of at least 1, not 0"),
        ("capability", [9], "`capability` is two whole numbers, as [9, 0], not [9]"),
        ("capability", [9, 1e999], "`capability` is two whole numbers, as [9, 0], not [9, inf]"),
        ("streams", "yes", "`streams` is true or false, not 'yes'"),
        ("attention", 3, "`attention` is the name of a kernel, not 3"),
    ):
        found = changed(path, **{field: wrong})
        assert found.startswith("own.json is no machine: ") and message in found
    with pytest.raises(SaveError, match="cannot be written: No such file or directory"):
        write_machine(tmp_path / "no" / "own.json", MACHINES["h100"])
