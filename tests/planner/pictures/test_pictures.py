"""Pictures show the numbers of their timelines, at every size, and are files of a reasonable one."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

from functionalize.cost.categories import Category
from functionalize.errors import PictureError
from functionalize.planner.allocator.allocator import simulate
from functionalize.planner.pictures import pictures
from functionalize.planner.pictures.page import memory_figure
from functionalize.planner.pictures.pictures import (
    COLUMNS,
    columns,
    memory_picture,
    time_columns,
)
from functionalize.planner.report.rows import (
    Span,
    event_times,
    exposed,
    reached,
    rows_of,
)
from functionalize.planner.timeline.timeline import Timeline
from functionalize.util.text import BYTES, human_bytes, human_seconds
from tests.planner.timelines import Maker, captured, large, real, schedule_of, step_of

pytest.importorskip("matplotlib")
GIB = 1 << 30


def texts(path: Path) -> list[str]:
    """The texts of an SVG: they stay text."""
    found = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
    return [text.strip() for text in found]


def length(intervals) -> float:
    return sum(end - start for start, end in intervals)


# -- memory ----------------------------------------------------------------------------------------


def test_the_picture_of_a_step_says_what_its_peak_is(tmp_path):
    eager, program = step_of(4)
    held = [nbytes + (8 << 20) for nbytes in eager.bytes]
    path = tmp_path / "memory.svg"
    memory_picture([eager, program], path, title="Four layers", held=held, limit=eager.peak + 5)
    said = texts(path)
    assert "Four layers" in said
    assert (
        f"peak {human_bytes(eager.peak)}" in said and f"the peak: {human_bytes(eager.peak)}" in said
    )
    assert f"program: peak {human_bytes(program.peak)}" in said
    assert f"on the device: peak {human_bytes(max(held))}" in said
    assert f"limit {human_bytes(eager.peak + 5)}" in said
    assert {"forward", "backward", "recompute", "optimizer"} <= set(said)
    assert eager.peak_op is not None and any(eager.peak_op.name in text for text in said)
    for category, nbytes in eager.categories_at(eager.peak_at).items():
        assert said[said.index(category.value) + 1] == human_bytes(nbytes)
    assert "layers.*.w: exp_avg (×4)" in said


def test_the_pictures_of_a_captured_step(tmp_path):
    eager, program, time = real()
    path = tmp_path / "memory.svg"
    memory_picture([eager, program], path, held=simulate(eager).bytes)
    said = texts(path)
    assert f"peak {human_bytes(eager.peak)}" in said
    assert f"program: peak {human_bytes(program.peak)}" in said
    assert f"on the device: peak {human_bytes(simulate(eager).peak)}" in said
    assert {"forward", "backward", "recompute", "optimizer"} <= set(said)
    assert length(exposed(time.spans)) == pytest.approx(time.exposed)


def test_memory_over_modelled_time(tmp_path):
    eager, program, time = real()
    times = event_times([eager, program], reached(captured().step.graph, time.spans))
    path = tmp_path / "memory.svg"
    memory_picture([eager, program], path, times=times)
    said = texts(path)
    count = sum(event.op >= 0 for event in eager.events)
    end = human_seconds(times["eager"][-1])
    assert f"{count:,} allocations and frees, over {end}, modelled" in said
    assert f"peak {human_bytes(eager.peak)}" in said and any(text.endswith("µs") for text in said)


def test_a_part_of_the_time_shows_its_event_with_the_most_bytes():
    values = [(7 * i) % 1009 for i in range(5000)]
    at = [(i // 10) ** 2 for i in range(5000)]
    found = time_columns(values, at, 10)
    assert found == sorted(set(found)) and len(found) <= 2 * COLUMNS
    assert max(values[10:]) == max(values[i] for i in found)
    width = (at[-1] - at[10]) / COLUMNS
    for i in range(20, 5000, 7):  # what is drawn at a moment is what an event near it has left
        assert min(abs(at[i] - at[f]) for f in found) <= width
    assert time_columns(values[:50], at[:50], 10) == list(range(10, 50))
    assert time_columns(values, [0] * 5000, 10)[-1] == 4999


def test_a_limit_far_above_does_not_flatten_the_picture(tmp_path):
    path = tmp_path / "memory.svg"
    memory_picture(step_of(1)[:1], path, limit=80 * GIB)
    assert "limit 80.0 GiB, far above" in texts(path)


def test_another_timeline_far_above_does_not_flatten_the_picture(tmp_path):
    eager, far = step_of(1)[0], step_of(1, scale=1 << 30)[1]
    memory_picture([eager, far], path := tmp_path / "memory.svg")
    found = texts(path)
    assert f"program: peak {human_bytes(far.peak)}, far above" in found
    assert not any("GiB" in text for text in found if not text.startswith("program"))
    page = memory_figure([eager, far], {})["layout"]
    first, second = (page["updatemenus"][0]["buttons"][i]["args"][1]["yaxis.range"] for i in (0, 2))
    assert page["yaxis"]["range"] == first and second[1] > 100 * first[1]
    unit = 1024 ** BYTES.index(page["yaxis"]["title"]["text"])
    assert eager.peak < first[1] * unit < 2 * eager.peak


def test_a_step_with_100_000_events_is_a_small_file(tmp_path):
    eager, _ = large()
    assert len(eager.events) > 100_000
    path = tmp_path / "memory.svg"
    memory_picture([eager], path)
    assert path.stat().st_size < 1 << 20
    assert f"peak {human_bytes(eager.peak)}" in texts(path)


def test_a_column_shows_its_event_with_the_most_bytes():
    values = [(7 * i) % 1009 for i in range(5000)]
    found = columns(values, 10, 5000)
    assert len(found) == COLUMNS and found == sorted(set(found))
    assert max(values[10:]) == max(values[i] for i in found)
    assert columns(values, 10, 60) == list(range(10, 60))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_the_name_says_what_kind_of_file(tmp_path, suffix):
    path = tmp_path / f"memory.{suffix}"
    memory_picture(step_of(1), path)
    head = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    assert path.read_bytes().startswith(head)


def test_the_same_plan_gives_the_same_file(tmp_path):
    a, b = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (a, b):
        memory_picture(step_of(2), path)
    assert a.read_bytes() == b.read_bytes()


def test_drawing_leaves_the_settings_of_matplotlib_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    memory_picture(step_of(1), tmp_path / "memory.png")
    assert dict(matplotlib.rcParams) == before


def test_one_allocation_with_an_odd_name(tmp_path):
    maker = Maker()
    maker.make(1 << 20, Category.INPUTS, "$x^{<&")
    path = tmp_path / "memory.svg"
    memory_picture([maker.timeline("$eager$")], path)
    assert "at the peak of $eager$" in texts(path) and "$x^{&lt;&amp;" in texts(path)
    assert "before the step" in texts(path)


# -- schedule --------------------------------------------------------------------------------------


def test_what_is_exposed_is_communication_without_compute():
    spans = [
        Span("all-gather 0", "a", 0, 10),
        Span("all-gather 1", "b", 8, 12),
        Span("compute", "c", 1, 2),
        Span("compute", "d", 4, 9),
        Span("compute", "e", 11, 30),
        Span("reduce-scatter", "f", 20, 31),
        Span("reduce-scatter", "g", 40, 41),
    ]
    found = exposed(reversed(spans))
    assert found == [(0, 1), (2, 4), (9, 11), (30, 31), (40, 41)]
    assert length(found) == 7
    assert exposed(spans[2:5]) == [] and exposed(spans[:1]) == [(0, 10)]


def test_exposed_agrees_with_looking_at_every_moment():
    spans = [span for layers in (1, 6) for span in schedule_of(layers)]
    found = exposed(spans)
    for i in range(2000):
        time = (i + 0.5) * max(span.end for span in spans) / 2000
        at = {span.stream == "compute" for span in spans if span.start <= time < span.end}
        assert any(a <= time < b for a, b in found) == (at == {False})


def test_rows_are_compute_first():
    assert list(rows_of(schedule_of(3))) == ["compute", "all-gather 0", "reduce-scatter 0"]


# -- refusals --------------------------------------------------------------------------------------


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(
        PictureError,
        match=r"memory\.gif cannot be drawn: a picture is \.png, \.svg, \.pdf .*write_page",
    ):
        memory_picture(step_of(1), tmp_path / "memory.gif")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        PictureError, match=r"memory\.png cannot be drawn: .*pip install \"functionalize\[plots\]\""
    ):
        memory_picture(step_of(1), tmp_path / "memory.png")


def test_only_drawing_imports_matplotlib():
    for path in Path(pictures.__file__).parents[1].rglob("*.py"):
        for node in ast.parse(path.read_text()).body:  # at the top level, not in functions
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "matplotlib" not in ast.unparse(node), path


def test_nothing_to_draw_is_refused(tmp_path):
    path = tmp_path / "x.png"
    for none in ([], [Timeline("eager", [], [], [])]):
        with pytest.raises(
            PictureError, match=r"no event in the timeline. Was the step captured with memory=True"
        ):
            memory_picture(none, path)
    with pytest.raises(
        PictureError,
        match=r"The device's bytes at 1 moments do not match the [\d,]+ events of `eager`",
    ):
        memory_picture(step_of(1), path, held=[5])
    assert not path.exists()
