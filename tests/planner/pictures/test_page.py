"""The page of a step's memory in a real browser: no request, the numbers of the report; hover, zoom, buttons work."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from functionalize.cost.categories import Category
from functionalize.errors import PictureError
from functionalize.planner.pictures import page
from functionalize.planner.pictures.page import Table, chosen, memory_figure, write_page
from functionalize.planner.report.figures import Peak
from functionalize.planner.report.rows import first_event
from functionalize.planner.timeline.timeline import Timeline
from functionalize.util.text import BYTES, human_bytes
from tests.planner.browser import NAMES, Browser, executable
from tests.planner.timelines import Maker, large, real, step_of

pytest.importorskip("plotly")
needs_browser = pytest.mark.skipif(
    executable() is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH"
)
HOSTILE = "</script><script>alert(1)</script> & <b>{{DATA}} <a href='https://a.b'>%{x}</a>"
EAGER, PROGRAM = step_of(4)
MEMORY = "memory"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_page(
        path,
        title=HOSTILE,
        timelines=[EAGER, PROGRAM],
        tables=[
            Table(
                "Communication",
                ["kind", "count", "bytes"],
                [["all-gather", 8, 3 << 30]],
                "Per rank.",
            ),
            Table(
                HOSTILE, ["seconds", "fits", "note"], [[0.25, True, None], [1e-3, False, HOSTILE]]
            ),
        ],
        facts={"machine": HOSTILE, "world": 16384, "memory bytes": 80 << 30},
        held={"eager": [n + 512 for n in EAGER.bytes]},
        limit=300 << 20,
    )
    return path


@pytest.fixture
def opened(browser, path):
    """The page, opened anew; it complains of nothing, and asks for nothing but its own file and its own data."""
    with opening(browser, path):
        yield browser


@contextmanager
def opening(browser: Browser, path: Path) -> Iterator[None]:
    """A page that neither complains nor makes a request."""
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(path)
    yield
    assert browser.complaints == []
    asked = [url for url in browser.requests if not url.startswith("data:")]
    assert asked == [path.resolve().as_uri()]


def text(browser: Browser, selector: str) -> str:
    found = browser.run(f"document.querySelector({json.dumps(selector)}).innerText")
    return " ".join(found.split())


def cells(browser: Browser, selector: str) -> list[list[str]]:
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )


def shown(browser: Browser, figure: str = MEMORY) -> tuple[float, float]:
    """The range of the x axis."""
    return tuple(browser.run(f"document.getElementById('{figure}')._fullLayout.xaxis.range"))


def traces(browser: Browser, keys: str) -> list[list]:
    """Of the visible stacked traces: those values of each."""
    return browser.run(
        f"document.getElementById('{MEMORY}')._fullData.filter(t => t.visible === true && t.stackgroup)"
        f".map(t => [{keys}])"
    )


def place(browser: Browser, figure: str, x: float, y: float) -> tuple[float, float]:
    """Where a point of a figure is in the window: x by its axis, y as a share of the height of the drawing."""
    left, top, _, _ = browser.box(f"#{figure}")
    axis = f"document.getElementById('{figure}')._fullLayout.xaxis"
    size = f"document.getElementById('{figure}')._fullLayout._size"
    return (
        left + browser.run(f"{axis}._offset + {axis}.l2p({x})"),
        top + browser.run(f"{size}.t + {y} * {size}.h"),
    )


def hover(browser: Browser, figure: str, x: float, y: float = 0.5) -> list[str]:
    """What is said at a point of a figure, line by line."""
    gone = f"!document.querySelector('#{figure} .hoverlayer').children.length"
    if not browser.run(gone):
        browser.mouse("mouseMoved", 1, 1)
        browser.run(f"Plotly.Fx.unhover('{figure}')")
        browser.wait(gone)
    browser.mouse("mouseMoved", *place(browser, figure, x, y))
    browser.wait(f"!({gone})")
    lines = browser.run(
        f"[...document.querySelectorAll('#{figure} .hoverlayer text')].flatMap(t => t.querySelector('.line') ? "
        "[...t.querySelectorAll('.line')].map(l => l.textContent) : [t.textContent])"
    )
    return [line.strip() for line in lines]


def click(browser: Browser, figure: str, label: str) -> None:
    """A button of a figure."""
    found = browser.run(
        f"(() => {{ document.getElementById('{figure}').scrollIntoView();"
        f"const b = [...document.querySelectorAll('#{figure} .updatemenu-button')]"
        f".find(b => b.textContent === {json.dumps(label)}).getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, *found, button="left", clickCount=1)


def bytes_of(timeline: Timeline, events: list[int], unit: int) -> list[list]:
    """What the stacked traces of a timeline must be: names, and the bytes of every category in the unit."""
    peak, last = Peak.of(timeline).categories, events[-1]
    return [
        [f"{c.value} {human_bytes(peak.get(c, 0))}", [values[e] / unit for e in [*events, last]]]
        for c, values in timeline.stacked().items()
    ]


def drawn(browser: Browser) -> list[list]:
    found = traces(browser, "t.name, Array.from(t.y)")
    return [[" ".join(name.split()), values] for name, values in found]


# -- memory ----------------------------------------------------------------------------------------


@needs_browser
def test_the_page_says_what_the_peaks_are(opened):
    said = text(opened, "body")
    assert f"Peak of eager: {Peak.of(EAGER).words()}" in said
    less = human_bytes(EAGER.peak - PROGRAM.peak)
    assert f"Peak of program: {Peak.of(PROGRAM).words()} {less} less than eager." in said
    assert f"peak {human_bytes(EAGER.peak)}" in text(opened, "#memory")
    assert opened.run("document.title") == HOSTILE and text(opened, "h1") == HOSTILE


@needs_browser
def test_the_numbers_are_those_of_both_timelines(opened):
    for timeline in (EAGER, PROGRAM):
        click(opened, MEMORY, timeline.name)
        events = [*range(first_event(timeline), len(timeline.events))]
        assert drawn(opened) == bytes_of(timeline, events, 1 << 20)
        sums = [sum(column) for column in zip(*(y for _, y in drawn(opened)), strict=True)]
        assert max(sums) == timeline.peak / (1 << 20)
        (x,) = {tuple(found) for (found,) in traces(opened, "Array.from(t.x)")}
        assert [*x] == [*range(len(events) + 1)]
        assert shown(opened) == (0, len(events))


@needs_browser
def test_hover_tells_the_event_and_every_category(opened):
    event = EAGER.peak_at + 7
    said = hover(opened, MEMORY, event - first_event(EAGER))
    op, allocation, made = EAGER.events[event]
    of = EAGER.ops[op]
    assert said[0] == f"event {event - first_event(EAGER)}"
    for line in (
        f"{human_bytes(EAGER.bytes[event])} in all",
        f"op {of.name}",
        f"module {of.module}",
        f"line {of.line}",
        f"phase {of.phase}",
        f"{'allocates' if made else 'frees'} {allocation.name} {allocation.shape}, {human_bytes(allocation.nbytes)}",
        f"on the device {(EAGER.bytes[event] + 512) / (1 << 20):,.3f} MiB",
        "sharded parameters 15.5 MiB",
    ):
        assert line in said, line
    for category, values in EAGER.stacked().items():
        (line,) = (line for line in said if re.match(rf"{category.value} [\d.]+ MiB", line))
        assert float(line.split()[-2]) == pytest.approx(values[event] / (1 << 20), abs=5e-4)


@needs_browser
def test_the_peak_tells_what_is_live(opened):
    at = EAGER.peak_at - first_event(EAGER)
    said = hover(opened, MEMORY, at, 0.1)
    live = said[said.index("the peak, of which the largest:") + 1 :]
    assert live[0] == "60.0 MiB grad of logits" and "32.0 MiB layers.*.w: exp_avg ×4" in live[:8]
    assert "the peak, of which the largest:" not in hover(opened, MEMORY, at + 1, 0.1)


@needs_browser
def test_wheel_drag_double_click_and_buttons_change_what_is_shown(opened):
    whole = shown(opened)
    middle = place(opened, MEMORY, sum(whole) / 2, 0.5)
    opened.mouse("mouseWheel", *middle, deltaX=0, deltaY=-300)
    opened.wait(f"document.getElementById('memory').layout.xaxis.range[0] !== {whole[0]}")
    zoomed = shown(opened)
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    click(opened, MEMORY, "eager: the peak")
    at = EAGER.peak_at - first_event(EAGER)
    assert shown(opened) == (at - 60, at + 60)
    left, right = place(opened, MEMORY, at - 10, 0.5), place(opened, MEMORY, at + 30, 0.5)
    opened.mouse("mouseMoved", *left)
    opened.mouse("mousePressed", *left, button="left", buttons=1, clickCount=1)
    for share in (0.5, 1):
        x = left[0] + share * (right[0] - left[0])
        opened.mouse("mouseMoved", x, left[1], button="left", buttons=1)
    opened.mouse("mouseReleased", *right, button="left", clickCount=1)
    assert shown(opened) == (pytest.approx(at - 10, abs=1), pytest.approx(at + 30, abs=1))
    # On a busy machine there is more between the two clicks than plotly allows for a double click;
    # its figure takes over what is allowed where it is drawn.
    opened.run(
        "document.getElementById('memory')._context.doubleClickDelay = 60000,"
        "Plotly.redraw('memory').then(() => null)"
    )
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            opened.mouse(kind, *middle, button="left", clickCount=count)
    opened.wait(f"document.getElementById('memory')._fullLayout.xaxis.range[1] === {whole[1]}")
    assert shown(opened) == whole


@needs_browser
def test_a_click_on_a_category_hides_it_and_the_stack_comes_down(opened):
    top = (
        "Math.max(...document.getElementById('memory').calcdata"
        ".filter(c => c[0].trace.stackgroup).at(-1).map(p => p.y))"
    )
    assert opened.run(top) == EAGER.peak / (1 << 20)
    x, y, width, height = opened.run(
        "(() => { const t = [...document.querySelectorAll('#memory .legend .traces')]"
        ".find(t => t.textContent.startsWith('optimizer state')).querySelector('.legendtoggle');"
        "t.scrollIntoView({block: 'center'}); const r = t.getBoundingClientRect();"
        "return [r.x, r.y, r.width, r.height]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        opened.mouse(kind, x + width / 2, y + height / 2, button="left", clickCount=1)
    opened.wait(f"{top} === {(EAGER.peak - (32 << 20)) / (1 << 20)}")


@needs_browser
def test_the_tables_of_the_peaks_are_those_of_the_timelines(opened):
    tables = opened.run("[...document.querySelectorAll('details')].map(d => [d.open, d.innerText])")
    assert [is_open for is_open, _ in tables] == [True, False]
    heads, *rows = cells(opened, "details[open] tr")
    assert heads[:4] == ["bytes", "what", "category", "shape"]
    first, live = rows[0], EAGER.live_at(EAGER.peak_at)
    op = EAGER.ops[live[0].made]
    assert first[:4] == [
        human_bytes(live[0].nbytes),
        live[0].name,
        live[0].category.value,
        live[0].shape,
    ]
    assert first[4] == f"{live[0].made}: {op.name} · {op.module} · {op.line}"
    assert ["layers.*.w: exp_avg ×4", "optimizer state"] in [row[1:3] for row in rows]
    exact = opened.run(
        "[...document.querySelectorAll('details[open] td:first-child')].map(c => c.title)"
    )
    assert sum(int(n.replace(",", "")) for n in exact) == EAGER.peak


# -- how wide it is --------------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize("width", [700, 1280])
def test_nothing_overflows(browser, path, width):
    browser.complaints.clear()
    browser.open(path, width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    # What is wider than the page scrolls by itself; figures do not, and the next text is below them.
    figures = "[...document.querySelectorAll('.plotly-graph-div')].map(f => ["
    sizes = "f.getBoundingClientRect().right, f.parentElement.offsetHeight, f._fullLayout.height])"
    for right, height, drawn_height in browser.run(figures + sizes):
        assert right <= width and height == drawn_height
    legend = "document.querySelector('#memory .legend').getBoundingClientRect()"
    plot = "document.querySelector('#memory .nsewdrag').getBoundingClientRect()"
    assert browser.run(f"{legend}.top >= {plot}.bottom")
    assert browser.run(f"{plot}.width") > 0.55 * width
    assert browser.complaints == []


@needs_browser
def test_a_narrow_page_shows_every_column_of_what_is_live(browser, path):
    table, cells = "document.querySelector('details table')", []
    for width in (1280, 700):
        browser.open(path, width=width)
        cells.append(browser.run(f"[...{table}.querySelectorAll('td')].map(c => c.innerText)"))
    box, made = f"{table}.parentElement", f"{table}.querySelector('td:nth-child(5)')"
    assert browser.run(f"{box}.scrollWidth <= {box}.clientWidth")
    assert "made by: " in browser.run(f"getComputedStyle({made}, '::before').content")
    assert cells[0] == cells[1]


# -- tables, facts ---------------------------------------------------------------------------------


@needs_browser
def test_tables_and_facts_are_text(opened):
    assert cells(opened, "h2 ~ .scroll tr")[-5:] == [
        ["kind", "count", "bytes"],
        ["all-gather", "8", "3.00 GiB"],
        ["seconds", "fits", "note"],
        ["250 ms", "yes", ""],
        ["1.00 ms", "no", HOSTILE],
    ]
    facts = opened.run("[...document.querySelectorAll('dd')].map(c => c.innerText)")
    assert facts == [HOSTILE, "16,384", "80.0 GiB"]


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.long
@needs_browser
def test_100_000_events(browser, tmp_path):
    eager, program = large()
    path = tmp_path / "large.html"
    write_page(path, timelines=[eager, program])
    assert len(eager.events) > 100_000 and path.stat().st_size < 20 << 20
    with opening(browser, path):
        assert f"Peak of eager: {Peak.of(eager).words()}" in text(browser, "body")
        assert drawn(browser) == bytes_of(eager, chosen(eager), 1 << 30)
        click(browser, MEMORY, "eager: the peak")
        at = eager.peak_at - 3
        said = hover(browser, MEMORY, at - first_event(eager))
        assert f"event {at - first_event(eager):,}" in said
        assert f"{human_bytes(eager.bytes[at])} in all" in said


def test_of_many_events_the_largest_and_all_near_the_peak_are_drawn():
    eager, _ = large()
    events = chosen(eager)
    assert events == sorted(set(events)) and eager.peak_at in events
    assert len(events) <= page.POINTS + 2 * page.NEAR
    assert events[0] >= first_event(eager)
    start = eager.peak_at - page.NEAR
    assert {*range(start, len(eager.events))} <= {*events}
    for event, after in pairwise(events):  # nothing between two of them has more bytes than both
        between = eager.bytes[event : after + 1]
        assert max(between) == max(between[0], between[-1])
    small = step_of(1)[0]
    assert chosen(small) == [*range(first_event(small), len(small.events))]


# -- other pages -----------------------------------------------------------------------------------


@needs_browser
def test_the_page_of_a_captured_step(browser, tmp_path):
    eager, program, _ = real()
    path = tmp_path / "real.html"
    write_page(path, timelines=[program, eager])
    with opening(browser, path):
        assert f"Peak of program: {Peak.of(program).words()}" in text(browser, "body")
        for timeline in (program, eager):
            click(browser, MEMORY, f"{timeline.name}: the peak")
            first = first_event(timeline)
            unit = 1024 ** BYTES.index(human_bytes(program.peak).split()[1])
            events = [*range(first, len(timeline.events))]
            assert drawn(browser) == bytes_of(timeline, events, unit)
            for event in range(timeline.peak_at + 1, timeline.peak_at + 20, 4):
                op = timeline.ops[timeline.events[event].op]
                said = hover(browser, MEMORY, event - first)
                assert f"{human_bytes(timeline.bytes[event])} in all" in said
                assert f"op {op.name}" in said and f"phase {op.phase}" in said
                assert (f"module {op.module}" in said) == bool(op.module)


@needs_browser
def test_names_with_markup_are_shown_as_they_are(browser, tmp_path):
    maker = Maker()
    maker.make(1 << 20, Category.INPUTS, "x")
    maker.op("aten.add", HOSTILE, HOSTILE)
    maker.make(1 << 20, Category.TEMPORARIES, HOSTILE)
    path = tmp_path / "hostile.html"
    write_page(path, timelines=[maker.timeline(HOSTILE)])
    with opening(browser, path):
        said = hover(browser, MEMORY, 1)
        assert f"module {HOSTILE}" in said and f"phase {HOSTILE}" in said
        assert f"allocates {HOSTILE} bf16[524288], 1.00 MiB" in said
        texts = browser.run("[...document.querySelectorAll('.legendtext')].map(t => t.textContent)")
        legends = [" ".join(text.split()) for text in texts]
        assert "inputs 1.00 MiB" in legends
        assert not browser.run("document.querySelectorAll('#memory a').length")


@needs_browser
def test_a_page_of_tables_alone(browser, tmp_path):
    path = tmp_path / "tables.html"
    write_page(path, tables=[Table("Sweep", ["batch"], [])])
    with opening(browser, path):
        assert text(browser, "body").startswith("Memory of a step Sweep batch")
        assert not browser.run("document.querySelectorAll('script').length")


@needs_browser
def test_one_allocation(browser, tmp_path):
    maker = Maker()
    maker.make(1 << 20, Category.INPUTS, "x")
    path = tmp_path / "one.html"
    write_page(path, timelines=[maker.timeline("eager")])
    with opening(browser, path):
        said = "Peak of eager: 1.00 MiB before the step: inputs 1.00 MiB (100%)."
        assert said in text(browser, "body")
        assert "op before the step" in hover(browser, MEMORY, 0)


def test_what_plotly_is_given_is_what_it_knows():
    from plotly.graph_objects import Figure

    for figure in (
        memory_figure([EAGER, PROGRAM], {"eager": EAGER.bytes}, 300 << 20),
        memory_figure([EAGER, PROGRAM, EAGER], {}, 80 << 30),
    ):
        Figure(figure)  # raises ValueError for a property that there is not


def test_a_page_forbids_every_request(path):
    found = path.read_text()
    assert "default-src 'none'" in found
    assert "connect-src" not in found and not re.search(r"-src [^;\"]*\*", found)
    head = re.sub("<title>.*?</title>", "", found.partition("<body>")[0])  # text, escaped
    assert re.findall(r"\b(?:src|href)=\"?([^\">]*)", head) == ["data:,"]


def test_the_same_plan_is_the_same_page(path, tmp_path):
    for name in ("a", "b"):
        write_page(tmp_path / name, timelines=[EAGER, PROGRAM])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_plotly_it_says_what_to_install(tmp_path, monkeypatch):
    found = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("plotly"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    path = tmp_path / "plan.html"
    with pytest.raises(
        PictureError, match=r"plan\.html cannot be written: .*pip install \"functionalize\[page\]\""
    ):
        write_page(path, timelines=[EAGER])
    assert not path.exists()
    write_page(path, tables=[Table("Sweep", ["batch"], [[1]])])  # needs no figure
    assert "Sweep" in path.read_text()


def test_only_writing_a_page_imports_plotly():
    for file in Path(page.__file__).parents[2].rglob("*.py"):
        for node in ast.parse(file.read_text()).body:  # at the top level, not in functions
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "plotly" not in ast.unparse(node), file


def test_nothing_to_show_is_refused(tmp_path):
    with pytest.raises(PictureError, match=r"The page `Plan` would be empty: .*memory=True"):
        write_page(tmp_path / "plan.html", title="Plan")
    with pytest.raises(
        PictureError, match=r"Pass one number per event, as `Memory\.held\(\)` returns them"
    ):
        write_page(tmp_path / "plan.html", timelines=[EAGER], held={"eager": [5]})
    assert not (tmp_path / "plan.html").exists()
