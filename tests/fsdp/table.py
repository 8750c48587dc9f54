"""The list of features in `docs/features.md`, made from the tables that the tests are parametrised with.

    python -m tests.fsdp.table            prints it
    python -m tests.fsdp.table --write    writes it into docs/features.md; `tests/test_readme.py` fails if it differs

Every entry is the title of a test. Its mark says what the test asserts: ✓ replayed bit for bit, ✗ eager
cannot run it on gloo, and the test shows eager's error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.fsdp import (
    features,
    test_boundary,
    test_checkpointing,
    test_context_parallel,
    test_messages,
    test_microbatches,
    test_optimizers,
    test_persist,
    test_pipelines,
    test_tensor_parallel,
)
from tests.fsdp.huggingface import CASES
from tests.pages import Part

PART = Part("features.md", "features", "tests.fsdp.table")
Row = tuple[str, list[str], str]


def rows() -> Iterator[Row]:
    """(group, features with their marks, the file of their tests)."""
    for group, found in features.GROUPS.items():
        titles = [
            f"✗ {r.title} (not on gloo)" if r.eager else f"✓ {r.title}" for r in found.values()
        ]
        yield group, titles, "test_features.py"
    proven = {
        "activation checkpointing, dropout on": (
            test_checkpointing.MODELS,
            "test_checkpointing.py",
        ),
        "a call per microbatch": (test_microbatches.WAYS, "test_microbatches.py"),
        "optimizers, default arguments": (
            map(_optimizer, test_optimizers.OPTIMIZERS),
            "test_optimizers.py",
        ),
        "numbers that are live": (_ALONE.keys(), "test_optimizers.py"),
        "Hugging Face, dropout by default": (map(_model, CASES), "test_huggingface.py"),
        "a forward alone, backward outside": (test_boundary.CASES, "test_boundary.py"),
        "saved, loaded in another process": (test_persist.KINDS, "test_persist.py"),
    }
    for group, (titles, file) in proven.items():
        yield group, [f"✓ {t if '`' in t else t.replace('_', ' ')}" for t in titles], file


_ALONE = {  # a test each
    "a scheduler of the rate, outside": test_optimizers.test_replays_under_a_scheduler_of_the_learning_rate,
    "one that cycles `betas`, too": (
        test_optimizers.test_a_scheduler_that_cycles_momentum_too_costs_one_more_capture
    ),
    "`GradScaler`, with overflows": (
        test_optimizers.test_a_gradient_scaler_skips_the_step_with_an_overflow
    ),
    "counts and norms that are read": (
        test_optimizers.test_replays_numbers_that_the_step_reads_and_computes_with
    ),
}
_NAMES = {"sgd": "SGD with momentum", "adam": "Adam", "adamw": "AdamW"}
_FORMS = {"single": "one by one"}
_MODELS = {
    "llama": "Llama",
    "gpt2": "GPT-2",
    "bert": "BERT",
    "vit": "ViT",
    "t5": "T5",
    "mixtral": "Mixtral",
    "qwen3 moe": "Qwen3-MoE",
    "electra": "ELECTRA",
    "wav2vec2": "wav2vec2",
}


def _optimizer(key: str) -> str:
    name, _, form = key.partition("_")
    return f"{_NAMES[name]}, {_FORMS.get(form, form)}" if form else _NAMES[name]


def _model(key: str) -> str:
    words = key.replace("_", " ")
    known = next((m for m in _MODELS if words.startswith(m)), None)
    return f"{_MODELS[known]}{words.removeprefix(known)}" if known else words


_ON_A_MESH = ", beside FSDP2 on a 2×2 mesh"
_COLUMNS = {None: "`passes` not given", "": '`""`', "default": '`"default"`', "fast": '`"fast"`'}


def parallelisms() -> Iterator[tuple[str, Callable[..., None]]]:
    """(what is done in parallel, its test)."""
    for kind in test_pipelines.KINDS:
        yield f"`{kind}`", test_pipelines.test_a_schedule
    for kind in test_pipelines.SHARDED:
        yield f"`{kind}`{_ON_A_MESH}", test_pipelines.test_a_schedule_of_sharded_stages
    for title in test_pipelines.LOOPS:
        yield f"`Schedule1F1B`, {title}", test_pipelines.test_a_loop
    yield "a pipeline by `isend` and `recv`", test_messages.test_a_pipeline_by_hand
    yield "attention on a ring, one backward through it", test_messages.test_attention_on_a_ring
    for title in test_context_parallel.WAYS.values():
        yield title, test_context_parallel.test_two_ranks
        yield f"{title}{_ON_A_MESH}", test_context_parallel.test_beside_data_parallelism
    for title in test_tensor_parallel.KINDS.values():
        yield title, test_tensor_parallel.test_two_ranks
        yield f"{title}{_ON_A_MESH}", test_tensor_parallel.test_a_mesh_of_four_ranks
    yield test_tensor_parallel.IN_PIPELINE, test_tensor_parallel.test_a_mesh_of_four_ranks


def _passes_of(test: Any) -> list[Any]:
    """The passes with which a test is parametrised."""
    marks = (mark.args for mark in test.pytestmark if mark.name == "parametrize")
    return next((values for name, values in marks if name == "passes"), [None])


def _table_of_parallelisms() -> str:
    lines = [
        "### Parallelism",
        "",
        "On 2 ranks, or 4 for a mesh; with the passes of each column. What has no ✓ was not run.",
        "",
        f"| in parallel | {' | '.join(_COLUMNS.values())} | test |",
        "| --- |" + " --- |" * (len(_COLUMNS) + 1),
    ]
    for title, test in parallelisms():
        passes, file = _passes_of(test), f"{test.__module__.rpartition('.')[2]}.py"
        marks = " | ".join("✓" if each in passes else "" for each in _COLUMNS)
        lines.append(f"| {title} | {marks} | [`{test.__name__}`](../tests/fsdp/{file}) |")
    return "\n".join(lines)


def table() -> str:
    """The rows as Markdown: a heading and a list for each group, with a link to the file of its tests."""
    sections = [_table_of_parallelisms()]
    for group, titles, file in rows():
        heading = f"### {group[0].upper()}{group[1:]}"
        link = f"[`{file}`](../tests/fsdp/{file})"
        sections.append("\n".join([heading, "", f"Tests: {link}", "", *(f"- {t}" for t in titles)]))
    return "\n\n".join(sections)


if __name__ == "__main__":
    PART.is_written(table())
