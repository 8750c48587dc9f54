"""A model that a transformers config describes, and the script that trains it.

    model = described("models/qwen3")        a folder with config.json, such a file, or the name of a repository
    model.layers                             {"Qwen3DecoderLayer": its module of code}
    script(model, Recipe(dtype="bfloat16"))  text of a module with `build`, `inputs` and `step`

    config ──▶ class by `architectures` ──▶ model on `meta` ──▶ layers, embeddings, inputs ──▶ text

What is sharded is what accelerate shards (`fsdp2_prepare_model`): each layer that the model names in
`_no_split_modules`; the embedding of the inputs; the last norm with the head, which stay gathered; the root with the
rest. Modules that share a parameter are in one group, as FSDP2 asks for: an embedding and a head are in that of the
head, others in the root's.
Refuses (`UsageError`): a config that cannot be read, a model whose class or inputs have no script here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from functionalize.errors import UsageError

_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_LONGEST = 4096  # tokens of a sequence by default, where a model takes more, or does not say


class Task(NamedTuple):
    """What a model is trained to do. mapping: of transformers' auto classes. inputs, labels: texts of tensors."""

    mapping: str
    inputs: str
    labels: str


_TOKENS = "torch.randint({vocabulary}, (rows, length))"
_PIXELS = "torch.randn(rows, {channels}, {height}, {width})"
_CLASS = "torch.randint({classes}, (rows,))"
_NAMES = {_TOKENS: "input_ids", _PIXELS: "pixel_values"}
# In this order where a config names no class: encoders have causal heads, too.
_TASKS = (
    Task(
        "SEQ_TO_SEQ_CAUSAL_LM",
        _TOKENS,
        "torch.randint({vocabulary}, (rows, target_length or length))",
    ),
    Task("MASKED_LM", _TOKENS, _TOKENS),
    Task("CAUSAL_LM", _TOKENS, _TOKENS),
    Task("IMAGE_CLASSIFICATION", _PIXELS, _CLASS),
    Task("SEQUENCE_CLASSIFICATION", _TOKENS, _CLASS),
    Task("TOKEN_CLASSIFICATION", _TOKENS, "torch.randint({classes}, (rows, length))"),
)


@dataclass(frozen=True, eq=False)
class Model:
    """What a config says of a model.

    where: of the config. config: transformers' object. name: of the class. task: what it is trained to do.
    layers: name of a class whose modules are sharded one by one -> its module of code. embedding: an expression of the
    embedding that is a group of its own, if there is one. last: of modules that stay gathered after forward.
    checkpointing: the method that lets layers be computed again in backward; None: there is none.
    """

    where: str
    config: Any
    name: str
    task: Task
    layers: dict[str, str]
    embedding: str | None
    last: tuple[str, ...]
    checkpointing: str | None

    @property
    def dtype(self) -> str:
        """The floating-point dtype that the config names; float32 if it names none."""
        return str(self.config.dtype or torch.float32).removeprefix("torch.")

    @property
    def inputs(self) -> str:
        """The name of the argument that the model computes with."""
        return _NAMES[self.task.inputs]


@dataclass(frozen=True)
class Recipe:
    """How a script trains a model.

    source: what the script is made from. dtype: of what is computed. policy: the arguments of `MixedPrecisionPolicy`;
    None: the parameters have the dtype, too. optimizer: an expression of a class, and its arguments after parameters.
    clip: the largest norm of gradients; None: not clipped. deferred: whether gradients are reduced after the last
    microbatch only. checkpoint: whether layers are computed again in backward, by the model's own method with
    `checkpoint_options`, or, if `wraps`, by modules around them.
    """

    source: str
    dtype: str
    policy: str | None = "dtype, reduce_dtype=torch.float32"
    batch: int = 1
    accumulate: int = 1
    reshard: bool = True
    checkpoint: bool = False
    checkpoint_options: str = ""
    wraps: bool = False
    offload: bool = False
    use_cache: bool = False
    optimizer: tuple[str, str] = ("torch.optim.AdamW", "lr=1e-4, fused=True")
    clip: float | None = None
    deferred: bool = False


# -- the model -------------------------------------------------------------------------------------


def described(where: str, layers: tuple[str, ...] | None = None) -> Model:
    """Read a config, and build its model on `meta`. layers: classes to shard one by one; None: the model's own.

    Raises `UsageError`.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise UsageError(
            f'{where} is a config of transformers, which is not installed: pip install "functionalize[models]"'
        ) from None
    config = _config(transformers, where)
    name, task = _class(config, where)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, name)(config)
    if model.main_input_name != _NAMES[task.inputs]:
        raise UsageError(
            f"{where}: {name} takes `{model.main_input_name}`, for which no inputs are made here: write a script with "
            "build, inputs and step"
        )
    wrapped = _layers(model, set(layers or model._no_split_modules or ()), layers is None)
    if not wrapped:
        raise UsageError(
            f"{where}: {name} names no layers that can be sharded one by one, and would be gathered as a whole: write "
            "a script with build, inputs and step, whose build calls fully_shard"
        )
    embedding, last = _others(model, wrapped)
    classes = {type(each).__name__: type(each).__module__ for each in wrapped}
    return Model(where, config, name, task, classes, embedding, last, _checkpointing(model))


def _config(transformers: Any, where: str) -> Any:
    is_path = where.endswith(".json") or where.startswith((".", "/")) or where.count("/") > 1
    if is_path and not Path(where).exists():
        raise UsageError(f"{where} is not there: give a folder with config.json, or that file")
    try:
        return transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"{where} is no config of transformers: {lines[0]} Give a folder with config.json, that file, or the name "
            "of a repository"
        ) from None


def _class(config: Any, where: str) -> tuple[str, Task]:
    """The name of the model's class, and its task: what the config names, else the first that its type has."""
    from transformers.models.auto import modeling_auto

    def classes(mapping: str) -> dict[str, Any]:
        return getattr(modeling_auto, f"MODEL_{mapping}MAPPING_NAMES", {})

    kind, named = config.model_type, list(config.architectures or ())
    if any(kind in classes(f"FOR_{each}_") for each in ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT")):
        raise UsageError(
            f"{where}: a {kind} takes images or sounds beside tokens, for which no inputs are made here: give the "
            "config of its text model (`text_config`), or write a script with build, inputs and step"
        )
    every = [(found, task) for task in _TASKS if (found := classes(f"FOR_{task.mapping}_"))]
    for name in named:
        for found, task in every:
            if name in found.values():
                return name, task
    if not set(named) - {classes("").get(kind)}:  # none, or the model without a head
        for found, task in every:
            if isinstance(found.get(kind), str):
                return found[kind], task
    tasks = ", ".join(task.mapping.lower().replace("_", " ") for task in _TASKS)
    raise UsageError(
        f"{where}: {' and '.join(named) or kind} is no model of these tasks: {tasks}. Name one of its classes in "
        "`architectures` of the config, or write a script with build, inputs and step"
    )


def _layers(model: nn.Module, names: set[str], is_own: bool) -> list[nn.Module]:
    """The modules of these classes. Of a model's own names, without classes that share parameters with others."""
    found = [each for each in model.modules() if type(each).__name__ in names]
    if missing := names - {type(each).__name__ for each in found} if not is_own else set():
        raise UsageError(f"{type(model).__name__} has no layers of the class {sorted(missing)[0]}")
    shared = _shared(model)
    with_shared = {
        type(layer)
        for layer in found
        if any(
            part in shared and not shared[part] <= set(layer.modules()) for part in layer.modules()
        )
    }
    return [each for each in found if type(each) not in with_shared]


def _shared(model: nn.Module) -> dict[nn.Module, set[nn.Module]]:
    """Each module that has a parameter which another has, too -> all that have it."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    found: dict[nn.Module, set[nn.Module]] = {}
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            found.setdefault(module, set()).update(modules)
    return found


def _others(model: Any, layers: list[nn.Module]) -> tuple[str | None, tuple[str, ...]]:
    """Expressions: of the embedding that is sharded by itself, of the modules that stay gathered after forward.

    An embedding that is tied to the head is gathered with it. What more modules share is left to the root, as a group
    of modules of which one never runs would not end.
    """
    paths = {module: path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    norms = [each for each in model.base_model.children() if "Norm" in type(each).__name__]
    elsewhere = {part for layer in layers for part in layer.modules()}
    shared = set(_shared(model))
    is_tied = shared == {embedding, head}
    if not is_tied:
        elsewhere |= shared
    ends = (*norms[-1:], *([embedding] if is_tied else ()), head)
    last = [each for each in ends if each is not None and each not in elsewhere]
    is_own = embedding not in elsewhere and embedding not in last
    return (
        _expression(paths[embedding]) if is_own else None,
        tuple(_expression(paths[module]) for module in last),
    )


def _expression(path: str) -> str:
    """`blocks.0.norm` as Python reads it."""
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))
    return f"model{''.join(parts)}"


def _checkpointing(model: Any) -> str | None:
    names = (
        "activation_checkpointing_enable",
        "gradient_checkpointing_enable",
    )  # the first since 5.20
    if not model.supports_gradient_checkpointing:
        return None
    return next(name for name in names if hasattr(model, name))


# -- the script ------------------------------------------------------------------------------------


def script(model: Model, recipe: Recipe) -> str:
    """The text of a module that trains a model: `build`, `inputs`, `step`, and a loop for torchrun."""
    return "\n\n\n".join(
        (
            _head(model, recipe),
            _build(model, recipe),
            _inputs(model, recipe),
            _step(model, recipe),
            _MAIN,
        )
    )


def _head(model: Model, recipe: Recipe) -> str:
    names = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]
    if recipe.policy is None:
        names.remove("MixedPrecisionPolicy")
    modules = {recipe.optimizer[0].rpartition(".")[0]} - {"torch.optim"}
    modules_of: dict[str, list[str]] = {}
    for name, module in sorted(model.layers.items()):
        modules_of.setdefault(module, []).append(name)
    quantised = getattr(model.config, "quantization_config", None) is not None
    remark = " The weights of its files are quantised, those that are trained here are not."
    return "\n".join(
        [
            f'"""A training step of {model.name}, made from {recipe.source}.',
            "",
            "    functionalize plan step.py --world 64 --set batch=2",
            "    torchrun --nproc-per-node 8 step.py",
            "",
            "Layers are sharded as accelerate shards them. Batches are random: let `inputs` return yours."
            + (remark if quantised else ""),
            '"""',
            "",
            "import os",
            "",
            "import torch",
            *(f"import {module}" for module in sorted(modules)),
            *(_imported(_WRAPPERS, ["checkpoint_wrapper"]) if recipe.wraps else ()),
            *_imported("torch.distributed.fsdp", names),
            *_imported("transformers", ["AutoConfig", model.name]),
            *(
                line
                for module in sorted(modules_of)
                for line in _imported(module, modules_of[module])
            ),
            "",
            f"CONFIG = {_quoted(model.where)}",
        ]
    )


def _imported(module: str, names: list[str]) -> list[str]:
    """The lines of an import, as ruff formats them."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 100:
        return [line]
    return [f"from {module} import (", *(f"    {name}," for name in names), ")"]


def _build(model: Model, recipe: Recipe) -> str:
    """`build`: its parameters are what `--set` can change."""
    options = {
        "dtype": _quoted(recipe.dtype),
        "reshard": recipe.reshard,
        "checkpoint": recipe.checkpoint,
        "offload": recipe.offload,
        "mesh": None,
    }
    if model.checkpointing is None and not recipe.wraps:
        del options["checkpoint"]
    layers = ", ".join(model.layers) if len(model.layers) == 1 else f"({', '.join(model.layers)})"
    cache = f", use_cache={recipe.use_cache}" if hasattr(model.config, "use_cache") else ""
    lines = [
        "dtype = getattr(torch, dtype)",
        f"config = AutoConfig.from_pretrained(CONFIG{cache})",
        f"model = {model.name}(config)"
        if recipe.policy is not None
        else f"model = {model.name}._from_config(config, dtype=dtype)",
    ]
    if recipe.wraps:
        lines += [
            "if checkpoint:",
            "    for path, module in list(model.named_modules()):",
            f"        if isinstance(module, {layers}):",
            "            wrapped = checkpoint_wrapper(module, preserve_rng_state=False)",
            "            model.set_submodule(path, wrapped)",
        ]
    elif "checkpoint" in options:
        lines += [
            "if checkpoint:",
            f"    model.{model.checkpointing}({recipe.checkpoint_options})",
        ]
    lines += ["options = {", '    "mesh": mesh,']
    if recipe.policy is not None:
        lines += [f'    "mp_policy": MixedPrecisionPolicy({recipe.policy}),']
    lines += [
        '    "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),',
        "}",
        "for module in reversed(list(model.modules())):  # inner ones first",
        f"    if isinstance(module, {layers}):",
        "        fully_shard(module, reshard_after_forward=reshard, **options)",
    ]
    if model.embedding is not None:
        lines += [f"fully_shard({model.embedding}, reshard_after_forward=reshard, **options)"]
    if model.last:
        one = model.last[0] if len(model.last) == 1 else f"[{', '.join(model.last)}]"
        lines += [f"last = {one}", "fully_shard(last, reshard_after_forward=False, **options)"]
    kind, arguments = recipe.optimizer
    lines += ["fully_shard(model, **options)"]
    returned = f"return model, {kind}(model.parameters(), {arguments})"
    lines += (
        [returned]
        if len(returned) <= 96
        else [f"return model, {kind}(", f"    model.parameters(), {arguments}", ")"]
    )
    words = (
        "parameters in float32, computed with in `dtype`"
        if recipe.policy is not None
        else "all of it in `dtype`"
    )
    return "\n".join(
        [
            f"def build({_parameters(options)}):",
            f'    """The sharded model and its optimizer: {words}."""',
            *(f"    {line}" for line in lines),
        ]
    )


def _inputs(model: Model, recipe: Recipe) -> str:
    texts = model.task.inputs, model.task.labels
    options: dict[str, Any] = {"batch": recipe.batch}
    if model.task.inputs == _TOKENS:
        options["length"] = _length(model.config)
    if "target_length" in model.task.labels:
        options["target_length"] = None
    options["accumulate"] = recipe.accumulate
    made = ",\n        ".join(text.format_map(_Sizes(model.config)) for text in texts)
    return f'''\
def inputs({_parameters(options)}):
    """What this rank trains on in one step: the rows of all its microbatches, and their labels."""
    rows = batch * accumulate
    return (
        {made},
    )'''


def _step(model: Model, recipe: Recipe) -> str:
    name = model.inputs
    clip = (
        [f"torch.nn.utils.clip_grad_norm_(model.parameters(), {recipe.clip})"]
        if recipe.clip is not None
        else []
    )
    lines = [
        f"parts = zip({name}.chunk(accumulate), labels.chunk(accumulate), strict=True)",
        *(
            [
                "for i, (x, y) in enumerate(parts, 1):",
                "    model.set_requires_gradient_sync(i == accumulate)",
            ]
            if recipe.deferred
            else ["for x, y in parts:"]
        ),
        f"    loss = model({name}=x, labels=y).loss",
        "    (loss / accumulate if accumulate > 1 else loss).backward()",
        *clip,
        "optimizer.step()",
        "optimizer.zero_grad()",
        "return loss.detach()",
    ]
    return "\n".join(
        [
            f"def step(model, optimizer, {name}, labels, accumulate={recipe.accumulate}):",
            '    """One training step, with the mean gradient of its microbatches."""',
            *(f"    {line}" for line in lines),
        ]
    )


_MAIN = """\
if __name__ == "__main__":
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    torch.distributed.init_process_group()
    torch.manual_seed(0)  # all ranks make the same parameters
    model, optimizer = build()
    for _ in range(10):
        print(step(model, optimizer, *inputs()).item())
    torch.distributed.destroy_process_group()
"""


class _Sizes(dict[str, int]):
    """The sizes of a config, read when a text asks for them."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __missing__(self, name: str) -> int:
        if name == "vocabulary":
            return int(self.config.get_text_config().vocab_size)
        if name == "classes":
            return int(self.config.num_labels)
        if name == "channels":
            return int(getattr(self.config, "num_channels", 3))
        size = getattr(self.config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        return int(height if name == "height" else width)


def _length(config: Any) -> int:
    """The length of a sequence by default."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions")
    return min(next((n for name in names if (n := getattr(text, name, None))), _LONGEST), _LONGEST)


def _parameters(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _quoted(text: str) -> str:
    """A literal with double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
