"""The script of a configuration of torchtitan: its own model, sharding, checkpointing, loss, clipping and optimizer.

    arguments("llama3.llama3_8b --training.seq_len 4096")
                        ["--module", "llama3", "--config", "llama3_8b", "--training.seq_len", "4096"]
    script("llama3_debugmodel")     text of a module with `build`, `inputs` and `step`

torchtitan reads its arguments itself, here and in the script. The step is that of its Trainer without what surrounds
it. What no plan can run is left out or replaced, and named in the script: FlexAttention and VarlenAttention (by SDPA),
the backend `spmd_types`, which needs torch 2.14 (by `partial_dtensor`), `torch.compile`, CUDA graphs, overrides.
Refuses (`UsageError`): what torchtitan refuses; and by name trainers other than torchtitan's own, models of images,
quantisation, pipeline, context and expert parallelism, offload, a batch for all ranks.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from functionalize.errors import UsageError

_NEEDED = ("torchtitan", "triton")  # torchtitan imports triton, which torch for CPUs does not bring


def script(where: str) -> str:
    """The text of the module that trains as a configuration says. where: see `arguments`. Raises `UsageError`."""
    given = arguments(where)
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UsageError(
            f"titan:{where} is a configuration of torchtitan, and needs {' and '.join(missing)}: "
            'pip install "functionalize[torchtitan]"'
        )
    if given[0] == "--config":
        given = ["--module", _module_of(where, given[1]), *given]
    config = _read(where, given)
    _check(where, config)
    return text_of(given, config)


def arguments(where: str) -> list[str]:
    """torchtitan's arguments: of `CONFIG` or `MODULE.CONFIG`, and of options after it. Raises `UsageError`."""
    try:
        name, *options = shlex.split(where)
    except ValueError:  # no name, an open quotation
        name, options = "", []
    module, _, config = name.rpartition(".")
    if not config or name.startswith("-"):
        raise UsageError(
            f"titan:{where} names no configuration: write a function of torchtitan's config_registry, and its options "
            'after it: "titan:llama3.llama3_8b --training.seq_len 4096"'
        )
    return [*(["--module", module] if module else ()), "--config", config, *options]


def _module_of(where: str, config: str) -> str:
    """The module of torchtitan's models whose registry has a function. The registries are read, not imported."""
    models = find_spec("torchtitan.models")
    folders = models.submodule_search_locations if models is not None else None
    registries = {
        file.parent.name: file.read_text(encoding="utf-8")
        for folder in folders or ()
        for file in sorted(Path(folder).glob("*/config_registry.py"))
    }
    for module, text in registries.items():
        if f"\ndef {config}(" in text:
            return module
    raise UsageError(
        f"titan:{where}: no model of torchtitan has the configuration `{config}` ({', '.join(registries)}): write "
        "module and function, as titan:my_package.small_llama"
    )


def _read(where: str, given: list[str]) -> Any:
    """The configuration, read by torchtitan."""
    written = io.StringIO()
    try:
        from torchtitan.config import ConfigManager

        with contextlib.redirect_stderr(written), contextlib.redirect_stdout(written):
            return ConfigManager().parse_args(given)
    except SystemExit:  # tyro has printed what it refuses, in a frame
        why = " ".join(re.split("-{9,}", written.getvalue())[1].split())
    except (ImportError, ValueError, AssertionError) as error:
        why = f"{error}"
    raise UsageError(f"titan:{where}: torchtitan does not take it: {why}")


def _check(where: str, config: Any) -> None:
    """Raises `UsageError` for what the script cannot follow."""
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.hf_datasets.text_datasets import ChatDataLoader, HuggingFaceTextDataLoader
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.trainer import Trainer

    def refuse(what: str) -> None:
        raise UsageError(
            f"titan:{where}: {what}. Give another configuration or other options, or write a script with build, inputs "
            "and step"
        )

    if type(config) is not Trainer.Config:
        refuse(f"{type(config).__qualname__} is not the configuration of torchtitan's own Trainer")
    loaders = HuggingFaceTextDataLoader.Config, ChatDataLoader.Config
    if not isinstance(config.model_spec.model, Decoder.Config) or not isinstance(
        config.dataloader, loaders
    ):
        refuse(f"{type(config.dataloader).__qualname__} loads what is not text alone")
    if has_quantization(config.model_spec.model):
        refuse("its layers are quantised, by kernels that have no plan")
    for kind in ("pipeline", "context", "expert"):
        if (degree := getattr(config.parallelism, f"{kind}_parallel_degree")) > 1:
            refuse(f"{kind}_parallel_degree is {degree}, which cannot be planned")
    if config.training.enable_cpu_offload:
        refuse("enable_cpu_offload: parameters that are made after fully_shard cannot be planned")
    if config.training.global_batch_size > 0:
        refuse(
            "global_batch_size: the microbatches of a rank depend on the world; leave it out, and give "
            "--set accumulate=N"
        )


def text_of(given: list[str], config: Any) -> str:
    """The script. given: the arguments that torchtitan has read as `config`."""
    line = json.dumps(given)
    lines = "\n    ".join(["[", *(f"{json.dumps(each)}," for each in given)]) + "\n]"
    out = [
        *(["torch.compile"] if config.compile.enable else []),
        *(["CUDA graphs"] if not config.training.disable_cuda_graphs else []),
        *(each if isinstance(each, str) else each[0] for each in config.override.imports),
    ]
    return _SCRIPT.format(
        name=given[3],
        arguments=line if len(line) < 88 else lines,
        left_out=f"\nLeft out: {', '.join(out)}." if out else "",
        length=config.training.seq_len,
        batch=config.training.local_batch_size,
        tp=config.parallelism.tensor_parallel_degree,
        vocabulary=config.model_spec.model.vocab_size,
    )


_SCRIPT = '''\
"""A training step of torchtitan's {name}, without its data, schedule, logs and files.

    functionalize plan step.py --world 64 --set batch=2

Attention is SDPA and the backend `partial_dtensor`, as others cannot be planned.{left_out}
"""

import torch
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.distributed import ParallelDims, utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.tools.utils import device_type, set_default_dtype

ARGUMENTS = {arguments}


def configured(length, tp, reshard, checkpoint):
    """The configuration. reshard, checkpoint: True or False; None: as it has them."""
    config = ConfigManager().parse_args(ARGUMENTS)
    config.training.seq_len = length
    config.training.disable_cuda_graphs = True
    config.compile.enable = False
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.tensor_parallel_degree = tp
    if reshard is not None:
        config.parallelism.fsdp_reshard_after_forward = "always" if reshard else "never"
    if checkpoint is not None:
        config.activation_checkpoint = FullAC.Config() if checkpoint else None
    for kind in (FlexAttention, VarlenAttention):
        for _, _, parent, name in list(config.model_spec.traverse(kind.Config)):
            setattr(parent, name, ScaledDotProductAttention.Config())
    config.model_spec.model.update_from_config(config=config)
    return config


def build(length={length}, tp={tp}, reshard=None, checkpoint=None):
    """The sharded model, its loss and optimizers, the largest norm of gradients, the meshes."""
    config = configured(length, tp, reshard, checkpoint)
    spec, backend = config.model_spec, config.parallelism.spmd_backend
    utils.set_spmd_backend(backend)
    ranks = torch.distributed.get_world_size()
    dims = ParallelDims.from_config(config.parallelism, ranks)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    model.to_empty(device=device_type)
    with torch.no_grad():
        model.init_weights()
    loss = config.loss.build(compile_config=config.compile)
    if isinstance(loss, ChunkedLossWrapper):
        loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizers = config.optimizer.build(model_parts=[model])
    if spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn(optimizers, [model], dims)
    return model.train(), loss, optimizers, config.training.max_norm, dims


def inputs(batch={batch}, length={length}, accumulate=1):
    """Tokens, positions and labels of a rank in one step: the rows of all its microbatches."""
    rows = batch * accumulate
    tokens, labels = torch.randint({vocabulary}, (2, rows, length)).unbind()
    return tokens, torch.arange(length).repeat(rows, 1), labels


def step(model, loss_fn, optimizers, max_norm, dims, tokens, positions, labels, accumulate=1):
    """One training step: gradients of the sum of losses over the tokens of all ranks."""
    optimizers.zero_grad()
    valid = (labels != IGNORE_INDEX).sum()
    if dims.dp_enabled:
        valid = utils.dist_sum_tensor(valid, dims.get_mesh("batch"))
    parts = (each.chunk(accumulate) for each in (tokens, positions, labels))
    for x, at, y in zip(*parts, strict=True):
        loss, _ = loss_fn(model(x, positions=at), y, valid, positions=at)
        loss.backward()
    utils.clip_grad_norm_(list(model.parameters()), max_norm, foreach=True)
    optimizers.step()
    return loss.detach()
'''
