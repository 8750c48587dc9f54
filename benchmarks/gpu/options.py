"""What a run is of: the device, its size, and the target that predictions are made for."""

from __future__ import annotations

from dataclasses import dataclass

from functionalize.planner.fake_world.target import Target

_MACHINES = {8: "a100", 9: "h100", 10: "b200"}


@dataclass(frozen=True)
class Options:
    """device: "cuda" or "cpu". small: a few facts of each section. capability: of the device that is predicted."""

    device: str = "cuda"
    small: bool = False
    capability: tuple[int, int] = (9, 0)

    @property
    def target(self) -> Target:
        """The target of fake worlds."""
        return Target(self.device, self.capability)

    @property
    def machine(self) -> str:
        """The name of the machine in `costs.py` and `constants.py`."""
        return _MACHINES.get(self.capability[0], "h100") if self.device == "cuda" else "cpu"
