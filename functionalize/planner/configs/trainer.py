"""transformers' TrainingArguments, as JSON beside the config.json of a model: what its Trainer does in a step.

    recipe, layers = read(Path("run/args.json"))

The Trainer hands FSDP2 to accelerate: with `bf16` the parameters are float32, and computed with, reduced and returned
in bfloat16; without, all is in the dtype of the config, in which `from_pretrained` loads the model. Gradients are
clipped, and those of several microbatches are reduced once. The optimizer has one group of parameters; the Trainer's
second, of norms and biases, differs in its weight decay alone.
Refuses (`UsageError`) by name: names that are no argument, and every value that is not the default, unless it is read
here or changes nothing in a step.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from functionalize.errors import UsageError
from functionalize.planner.configs.hugging_face import Recipe

_READ = re.compile(
    r"per_device_train_batch_size|gradient_accumulation_steps|accelerator_config|max_grad_norm|use_cache|bf16|tf32"
    r"|optim|optim_args|learning_rate|weight_decay|adam_(beta1|beta2|epsilon)|fsdp|fsdp_config"
    r"|(gradient|activation)_checkpointing(_kwargs)?"
)
# What surrounds a step: data, schedules, logs, evaluation, files, seeds; and DDP, which FSDP2 replaces.
_AROUND = re.compile(
    r"(output|logging|log|eval|save|hub|push|dataloader|lr_scheduler|warmup|ddp|do|trackio|resume|report|run|label_names"
    r"|batch_eval|per_device_eval|train_sampling|length_column|group_by|metric|greater|load_best|prediction|project"
    r"|include|ignore_data|restore|remove_unused|skip_memory|disable_tqdm|num_train|max_steps|seed|data_seed"
    r"|average_tokens|enable_jit|bf16_full|fp16_full|full_determinism|local_rank)(_|$)"
)
_FSDP_AROUND = re.compile(
    r"min_num_params|cpu_ram_efficient_loading|sync_module_states|state_dict_type|use_orig_params|limit_all_gathers"
    r"|(forward|backward)_prefetch|xla_fsdp_settings"
)


def read(path: Path, dtype: str) -> tuple[Recipe, tuple[str, ...] | None]:
    """How the Trainer trains; the classes of layers that are sharded one by one, if it is told.

    dtype: of the model's config. Raises `UsageError`.
    """
    args = _Arguments(path)
    fsdp = _fsdp(args)
    wraps = _flag(fsdp.get("activation_checkpointing", False))
    names = ("activation_checkpointing", "gradient_checkpointing")  # the second is older
    is_own = any(args.get(name) for name in names)
    if wraps and is_own:
        raise args.refused("layers are computed again twice: by fsdp_config, and by the model")
    clip = float(args["max_grad_norm"] or 0.0)
    recipe = Recipe(
        f"the TrainingArguments of {path.name}",
        "bfloat16" if args["bf16"] else dtype,
        policy="dtype, dtype, dtype" if args["bf16"] else None,
        batch=int(args["per_device_train_batch_size"]),
        accumulate=int(args["gradient_accumulation_steps"]),
        reshard=_flag(fsdp.get("reshard_after_forward", True)),
        checkpoint=wraps or is_own,
        checkpoint_options=_options_of_checkpoints(args, names),
        wraps=wraps,
        offload=_flag(fsdp.get("cpu_offload", False)),
        use_cache=bool(args["use_cache"]),
        optimizer=_optimizer(args),
        clip=clip if clip > 0 else None,
        deferred=_is_deferred(args),
    )
    named = fsdp.get("transformer_layer_cls_to_wrap")
    return recipe, (named,) if isinstance(named, str) else tuple(named) if named else None


class _Arguments(dict[str, Any]):
    """The values of a file, and the defaults of those that it does not name."""

    def __init__(self, path: Path) -> None:
        from transformers import TrainingArguments

        self.path = path
        found = _object(path)
        defaults = {each.name: each.default for each in dataclasses.fields(TrainingArguments)}
        for name, value in found.items():
            if name not in defaults:
                raise self.refused(f"{name}: no argument of TrainingArguments has this name")
            default = defaults[name]
            if (
                _READ.fullmatch(name)
                or _AROUND.match(name)
                or value == default
                or (not value and not default)
            ):
                continue
            raise self.refused(
                f"{name}: {value!r}: it changes a step, and the script cannot follow"
            )
        super().__init__({**defaults, **found})
        if self["tf32"] and not self["bf16"]:
            raise self.refused("tf32: its matrix products have no modelled time: leave it out")

    def refused(self, what: str) -> UsageError:
        return UsageError(
            f"{self.path}: {what}. Take it out, or edit the script that --show-script prints without it"
        )


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}: arguments are an object of JSON")
    return found


def _fsdp(args: _Arguments) -> dict[str, Any]:
    """The entries of `fsdp_config`, with what older values of `fsdp` stand for."""
    if not args["fsdp"]:
        raise args.refused(
            "fsdp is not set, so the Trainer would replicate the model by DistributedDataParallel, which cannot be "
            'planned: write "fsdp": true'
        )
    config = args["fsdp_config"] or {}
    config = _object(Path(config)) if isinstance(config, str) else config
    entries = {name.removeprefix("fsdp_"): value for name, value in config.items()}
    older = args["fsdp"]
    for item in older.split() if isinstance(older, str) else older if older is not True else ():
        meaning = _OLDER.get(item)
        if meaning is None:
            raise args.refused(f"fsdp: {item!r} is not known for FSDP2")
        entries = {**meaning, **entries}
    for name, value in entries.items():
        fits = _FSDP_VALUES.get(name)
        if not _FSDP_AROUND.fullmatch(name) and (fits is None or not fits(value)):
            raise args.refused(f"fsdp_config: {name}: {value!r}: the script cannot follow")
    return entries


def _options_of_checkpoints(args: _Arguments, names: tuple[str, ...]) -> str:
    """The arguments of the model's method that lets layers be computed again."""
    found: Any = next((own for name in names if (own := args.get(f"{name}_kwargs"))), {})
    options = json.loads(found) if isinstance(found, str) else dict(found)
    if options.pop("offload", False):
        raise args.refused(f"{names[0]}_kwargs: offload: its copies to the host are not planned")
    every = options.pop("every_n_layers", 1)
    texts = [repr(options).replace("'", '"')] if options else []
    return ", ".join([*texts, *([f"every_n_layers={every}"] if every != 1 else ())])


def _is_deferred(args: _Arguments) -> bool:
    """Whether gradients are reduced after the last microbatch only."""
    config = args["accelerator_config"] or {}
    config = _object(Path(config)) if isinstance(config, str) else config
    if config.get("split_batches"):
        raise args.refused(
            "accelerator_config: split_batches: the batch of a rank depends on the world"
        )
    own = dict(config.get("gradient_accumulation_kwargs") or {})
    is_each = bool(own.pop("sync_each_batch", False))
    if own:
        raise args.refused(f"accelerator_config: gradient_accumulation_kwargs: {own}")
    return not is_each


def _optimizer(args: _Arguments) -> tuple[str, str]:
    """An expression of the optimizer's class, and its arguments after the parameters."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    name = args["optim"]
    try:
        values = SimpleNamespace(**{**args, "optim": OptimizerNames(name)})
        kind, options = Trainer.get_optimizer_cls_and_kwargs(values)
    except (ValueError, ImportError) as error:
        raise args.refused(f"optim: {name}: {str(error).splitlines()[0]}") from None
    options = {**options, "weight_decay": args["weight_decay"]}
    where = "torch.optim" if getattr(torch.optim, kind.__name__, None) is kind else kind.__module__
    if where.partition(".")[0] not in ("torch", "transformers"):
        raise args.refused(f"optim: {name}: {where}.{kind.__name__} has kernels of its own")
    return f"{where}.{kind.__name__}", ", ".join(
        f"{key}={value!r}" for key, value in options.items()
    )


def _flag(value: Any) -> bool:
    return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)


_OLDER: dict[str, dict[str, Any]] = {
    "full_shard": {"reshard_after_forward": True},
    "shard_grad_op": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
    "auto_wrap": {},
}
# What the entries of `fsdp_config` that a step depends on may be.
_FSDP_VALUES: dict[str, Any] = {
    "version": lambda value: int(value) == 2,
    "auto_wrap_policy": lambda value: str(value).upper() == "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": lambda value: str(value).lower() in ("true", "false"),
    "xla": lambda value: not value,
    "xla_fsdp_v2": lambda value: not value,
    "xla_fsdp_grad_ckpt": lambda value: not value,
    **dict.fromkeys(
        ("cpu_offload", "activation_checkpointing", "transformer_layer_cls_to_wrap"),
        lambda value: True,
    ),
}
