"""Every case by its name: the features of autograd that captures promise, each under one name, then further graphs.

NAMED["retain_inplace"](model(), x, EAGER)      `retain_grad`, then a write in place
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.step_backward import eager_graphs as graphs
from tests.step_backward import hooked_graphs as hooked
from tests.step_backward.runs import Run

Case = Callable[[Any, Tensor, Run], Any]


def backward_in_a_thread(m: Any, x: Tensor, run: Run) -> Any:
    first, second = m(x).square().mean(), m(x * 2).square().mean()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            run.backward(second)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    run.backward(first)


NAMED: dict[str, Case] = {
    "hook_order": hooked.hook_order,
    "retain_inplace": hooked.retained_after_write,
    "post_acc": hooked.accumulated,
    "saved_hooks": hooked.saved_half,
    "saved_hooks_int8": hooked.saved_int8,
    "save_on_cpu": hooked.saved_on_cpu,
    "disable_saved": hooked.saved_hooks_disabled,
    "custom_fn": graphs.custom_function,
    "custom_fn_vmap": graphs.custom_function_vmap,
    "func_grad": graphs.functional_gradient,
    "hessian": graphs.hessian,
    "grad_edge": hooked.gradient_edges,
    "zero_bubble": hooked.zero_bubble,
    "create_graph": graphs.second_derivative,
    "frozen": graphs.frozen,
    "only_input": graphs.only_the_input,
    "anomaly": graphs.anomaly,
    "anomaly_nan": graphs.anomaly_checked,
    "multi_grad_hook": hooked.multi_grad_hook,
    "accgrad_hook": hooked.accumulate_grad_hook,
    "current_node_in_hook": hooked.current_node,
    "module_bw_hooks": hooked.module_hooks,
    "ckpt_early": graphs.checkpointed,
    "threads": backward_in_a_thread,
    "fwd_ad": graphs.forward_mode,
    "accumulate_layout": graphs.accumulated_twice,
}

_NAMED = set(NAMED.values())
CASES = NAMED | {
    case.__name__: case for case in [*hooked.HOOKED, *graphs.PLAIN] if case not in _NAMED
}
