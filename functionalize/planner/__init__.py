"""What a step costs, and what it could cost: memory, time and traffic, measured on fake tensors in a fake world.

`fz.plan`, `fz.tune`, `fz.world` and `fz.record_memory` begin; here is what they take and what shows their results:

    fz.world(64, target=fz.planner.Target("cuda", capability=(8, 0)))
    fz.planner.write_page("memory.html", timelines=[*step.memory.timelines.values()])
"""

from typing import TYPE_CHECKING

from functionalize.util.late_names import late_names

if TYPE_CHECKING:
    from functionalize.cost.machines.machine import Machine
    from functionalize.cost.machines.presets import MACHINES
    from functionalize.planner.calibration.calibrate import calibrate
    from functionalize.planner.fake_world.target import Target
    from functionalize.planner.pictures.chrome_trace import write_trace
    from functionalize.planner.pictures.page import write_page
    from functionalize.planner.pictures.pictures import memory_picture
    from functionalize.planner.pictures.tape_picture import tape_picture
    from functionalize.planner.report.figures import quantities
    from functionalize.planner.sweep.training import Training
else:
    __getattr__, __dir__ = late_names(
        __name__,
        {
            "MACHINES": "functionalize.cost.machines.presets",
            "Machine": "functionalize.cost.machines.machine",
            "Target": "functionalize.planner.fake_world.target",
            "Training": "functionalize.planner.sweep.training",
            "calibrate": "functionalize.planner.calibration.calibrate",
            "memory_picture": "functionalize.planner.pictures.pictures",
            "quantities": "functionalize.planner.report.figures",
            "tape_picture": "functionalize.planner.pictures.tape_picture",
            "write_page": "functionalize.planner.pictures.page",
            "write_trace": "functionalize.planner.pictures.chrome_trace",
        },
    )

__all__ = [
    "MACHINES",
    "Machine",
    "Target",
    "Training",
    "calibrate",
    "memory_picture",
    "quantities",
    "tape_picture",
    "write_page",
    "write_trace",
]
