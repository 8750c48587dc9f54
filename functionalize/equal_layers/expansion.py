"""A whole recording of a step from a short one of other arguments: the layers that were left out are put back.

    left_out = LeftOut(whole, layers)       of a whole run
    expand(left_out, short)                 a short run of other arguments becomes a whole one

That is what a whole recording would be if layers that are equal do the same. What is checked: they have done the
same in the whole recording; and both recordings have the same ops of the other layers, on the same storages.
"""

from __future__ import annotations

from functionalize.equal_layers.expanded_run import ExpandedRun
from functionalize.equal_layers.expanded_tape import ExpandedTape
from functionalize.equal_layers.left_out import LeftOut
from functionalize.equal_layers.recorded_run import RunRecord


def expand(left_out: LeftOut, short: RunRecord) -> ExpandedRun:
    """Put the layers that were left out into a short recording. One that does not fit is not changed (`Unlike`)."""
    run = ExpandedRun(left_out, short)
    tape = ExpandedTape(run)
    run.write()
    tape.write()
    return run
