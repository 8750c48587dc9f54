"""The scripts that configs stand for, by the prefix of what names them.

    hf:models/qwen3         a config of transformers: a folder with config.json, that file, or the name of a repository
    trainer:run/args.json   transformers' TrainingArguments, beside the config.json of the model
    titan:llama3_8b         a configuration of torchtitan, or MODULE.NAME of one, and torchtitan's options after it

What is printed and what is planned is one text. Raises `UsageError`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from functionalize.errors import UsageError
from functionalize.planner.configs.hugging_face import Recipe, described, script


def is_config(source: str) -> bool:
    """Whether a source names a config, not a script."""
    return source.partition(":")[0] in _MADE_BY


def script_of(source: str) -> str:
    """The text of the script that a config stands for."""
    kind, _, where = source.partition(":")
    return _MADE_BY[kind](where)


def _of_hugging_face(where: str) -> str:
    model = described(where)
    return script(model, Recipe("its config", model.dtype))


def _of_trainer(where: str) -> str:
    from functionalize.planner.configs.trainer import read

    path = Path(where)
    model = described(str(path.parent))
    recipe, layers = read(path, model.dtype)
    if layers is not None:
        model = described(str(path.parent), layers)
    if recipe.checkpoint and not recipe.wraps and model.checkpointing is None:
        raise UsageError(f"{where}: {model.name} has no activation checkpointing: leave it out")
    return script(model, recipe)


def _of_torchtitan(where: str) -> str:
    from functionalize.planner.configs import torchtitan

    return torchtitan.script(where)


_MADE_BY: dict[str, Callable[[str], str]] = {
    "hf": _of_hugging_face,
    "trainer": _of_trainer,
    "titan": _of_torchtitan,
}
