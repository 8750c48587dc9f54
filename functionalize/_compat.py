"""Every private torch import of the library, each with its reason and the versions it was seen in.

Seen in torch 2.11 and 2.13 unless a line says otherwise. Nothing else in `functionalize` or `passes`
imports a name with a leading underscore from torch.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import (  # fakes for `trace`; has no public home
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.passes.shape_prop import TensorMetadata  # the type of node.meta["tensor_meta"]
from torch.utils._python_dispatch import (  # the only hook below autograd
    TorchDispatchMode,
    _get_current_dispatch_mode_stack as current_modes,  # which recorder is active in this thread
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._traceback import CapturedTraceback  # lazily symbolised stack, about 1.5 us

__all__ = [
    "CapturedTraceback",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TensorMetadata",
    "TorchDispatchMode",
    "current_modes",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "load_fsdp_ops",
    "work_class",
]


def load_fsdp_ops() -> None:
    """Register the `fsdp::*` and `c10d::*` ops; a build without distributed has neither."""
    try:
        import torch.distributed.fsdp._fully_shard._fsdp_collectives
    except ImportError:
        return


def work_class() -> type | None:
    """The class whose `wait` completes a collective; None in a build without distributed."""
    try:
        from torch._C._distributed_c10d import Work
    except ImportError:
        return None
    return Work


def fsdp_state_of(module: object) -> Any:
    """The FSDP2 state of a module that `fully_shard` was applied to, else None."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
    except ImportError:
        return None
    return _get_module_fsdp_state(module)  # type: ignore[arg-type]
