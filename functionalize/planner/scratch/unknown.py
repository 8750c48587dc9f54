"""Kernels that allocate inside themselves and are in no table: a report counts 0 for them, and names them.

    uncounted(targets, "cuda")      {"_scaled_dot_product_cudnn_attention_backward": 32}

Op                                          why there is no figure
cuDNN attention, backward                   cuDNN chooses a plan, and its workspace, at run time
convolutions                                cuDNN and MIOpen measure or guess an algorithm; oneDNN blocks its operands
recurrent layers                            cuDNN's workspace and reserve space; oneDNN's packed weights, and the
                                            workspace of an LSTM, which is empty on fake tensors

Source: `getMaxWorkspaceSize` of aten/src/ATen/native/cudnn/Conv_v7.cpp, `cudnnGetRNNTempSpaceSizes` in RNN.cpp,
`mha_graph->get_workspace_size()` in MHA.cpp. That of oneDNN: `docs/plan.md`, what is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from functionalize.planner.scratch.scratch import base_name

_ANYWHERE = frozenset(
    (
        *("convolution", "_convolution", "convolution_overrideable", "convolution_backward"),
        *("convolution_backward_overrideable", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    )
)
_ON_A_GPU = _ANYWHERE | frozenset(
    (
        *("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward"),
        *("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"),
        *("cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu"),
        *("miopen_convolution", "miopen_convolution_transpose", "miopen_depthwise_convolution"),
    )
)


def uncounted(targets: Iterable[Any], device: str) -> Mapping[str, int]:
    """The ops whose scratch no table has, with the number of their calls. device: whose kernels run."""
    unknown = _ANYWHERE if device == "cpu" else _ON_A_GPU
    calls = Counter(targets)
    found: Counter[str] = Counter()
    for target, count in calls.items():
        name = base_name(target)
        if name in unknown:
            found[name] += count
    return dict(found)
