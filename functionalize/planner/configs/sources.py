"""The scripts that configs stand for, by the prefix of what names them.

    hf:models/qwen3         a config of transformers: a folder with config.json, that file, or the name of a repository
    trainer:run/args.json   transformers' TrainingArguments, beside the config.json of the model
    titan:llama3.llama3_8b  a configuration of torchtitan: its module and its function

What is printed and what is planned is one text. Raises `UsageError`.
"""

from __future__ import annotations

from collections.abc import Callable

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


_MADE_BY: dict[str, Callable[[str], str]] = {"hf": _of_hugging_face}
