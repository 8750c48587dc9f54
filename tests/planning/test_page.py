"""The page of a plan in a real browser: it loads without a network, says the peak, and hover, zoom and keys work."""

from __future__ import annotations

import json
import re

import pytest

from functionalize.errors import PictureError
from functionalize.planning.display import Peak, first_event, human_bytes, human_seconds
from functionalize.planning.page import Table, page, write_page
from functionalize.planning.spans import Span
from functionalize.planning.timeline import Category
from tests.planning.browser import NAMES, Browser, executable
from tests.planning.timelines import Maker, large, real, schedule_of, step_of

needs_browser = pytest.mark.skipif(
    executable() is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH"
)
HOSTILE = "</script><script>alert(1)</script> & <b>{{DATA}}"
EAGER, PROGRAM = step_of(4)


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
        spans=schedule_of(4),
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
        reserved={"eager": [n + 512 for n in EAGER.bytes]},
        limit=300 << 20,
    )
    return path


@pytest.fixture
def opened(browser, path):
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(path)
    yield browser
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


def text(browser: Browser, selector: str) -> str:
    found = browser.run(f"document.querySelector({json.dumps(selector)}).innerText")
    return " ".join(found.split())


def view(browser: Browser, canvas: str = "#timeline") -> tuple[float, float]:
    data = browser.run(f"({{...document.querySelector('{canvas}').dataset}})")
    return float(data["from"]), float(data["to"])


def click(browser: Browser, selector: str) -> None:
    x, y, width, height = browser.box(selector)
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, x + width / 2, y + height / 2, button="left", clickCount=1)


@needs_browser
def test_the_page_says_what_the_peak_is(opened):
    assert text(opened, "#peak").startswith(f"Peak of eager: {Peak.of(EAGER).words()}")
    less = human_bytes(EAGER.peak - PROGRAM.peak)
    assert f"With the lifetimes of program: {human_bytes(PROGRAM.peak)}, {less} less." in text(
        opened, "#peak"
    )
    assert text(opened, "#moment") == f"At the peak: {human_bytes(EAGER.peak)}"
    legend = opened.run(
        "[...document.querySelectorAll('#legend button')].map(b => b.innerText.split(/\\n+/))"
    )
    stacked = EAGER.stacked()
    at_peak = [[c.value, human_bytes(values[EAGER.peak_at])] for c, values in stacked.items()]
    assert [[part.strip() for part in row] for row in legend] == at_peak[::-1]
    assert opened.run("document.title") == HOSTILE and text(opened, "h1") == HOSTILE


@needs_browser
def test_the_table_of_the_peak_is_that_of_the_timeline(opened):
    opened.run("document.querySelector('#grouped').click()")
    rows = opened.run(
        "[...document.querySelectorAll('#at-peak tbody tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    live = EAGER.live_at(EAGER.peak_at)
    assert [row[0] for row in rows] == [human_bytes(a.nbytes) for a in live[:25]]
    first = live[0]
    assert rows[0][1:4] == [first.name, first.category.value, first.shape]
    assert rows[0][4].startswith(EAGER.ops[first.made].name)
    assert rows[0][6].startswith(EAGER.ops[first.freed].name)
    assert ["before the step", "outlives the step"] in [[row[4], row[6]] for row in rows]


@needs_browser
def test_the_cursor_shows_a_tooltip_with_what_is_live(opened):
    x, y, width, height = opened.box("#timeline")
    assert opened.run("document.querySelector('#memory-tooltip').hidden")
    opened.mouse("mouseMoved", x + width / 2, y + height - 60)
    said = text(opened, "#memory-tooltip")
    event = int(re.search(r"At event (\d+)", text(opened, "#moment")).group(1)) + first_event(EAGER)
    op = EAGER.ops[EAGER.events[event].op]
    allocation = EAGER.events[event].allocation
    assert "sharded parameters: 15.5 MiB" in said  # the lowest of the stack
    assert f"{human_bytes(EAGER.bytes[event])} in all" in said
    assert f"reserved {human_bytes(EAGER.bytes[event] + 512)}" in said
    for part in (f"op {op.name}", f"module {op.module}", f"line {op.line}", f"phase {op.phase}"):
        assert part in said
    assert f"{allocation.name}, {human_bytes(allocation.nbytes)}" in said
    assert human_bytes(EAGER.live_at(event)[0].nbytes) in text(opened, "#live li")
    opened.mouse("mouseMoved", x + width / 2, y - 30)
    assert opened.run("document.querySelector('#memory-tooltip').hidden")


@needs_browser
def test_wheel_drag_and_buttons_change_what_is_shown(opened):
    whole = view(opened)
    assert whole == (first_event(EAGER), len(EAGER.events))
    x, y, width, height = opened.box("#timeline")
    place = {"x": x + width / 2, "y": y + height / 2}
    opened.mouse("mouseWheel", **place, deltaX=0, deltaY=-300)
    zoomed = view(opened)
    assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
    opened.mouse("mousePressed", **place, button="left", buttons=1, clickCount=1)
    opened.mouse("mouseMoved", place["x"] + 120, place["y"], button="left", buttons=1)
    opened.mouse("mouseReleased", place["x"] + 120, place["y"], button="left", clickCount=1)
    moved = view(opened)
    assert moved[0] < zoomed[0] and moved[1] - moved[0] == pytest.approx(
        zoomed[1] - zoomed[0], abs=1
    )
    click(opened, "#zoom-in")
    assert view(opened)[1] - view(opened)[0] < 0.6 * (moved[1] - moved[0])
    click(opened, "#whole")
    assert view(opened) == whole
    for _ in range(8):  # as near as it goes: single events
        opened.mouse("mouseWheel", **place, deltaX=0, deltaY=-300)
    assert 8 <= view(opened)[1] - view(opened)[0] <= 9
    for _ in range(8):
        opened.mouse("mouseWheel", **place, deltaX=0, deltaY=300)
    assert view(opened) == whole


@needs_browser
def test_the_keyboard_does_the_same(opened):
    whole = view(opened)
    opened.run("document.querySelector('#timeline').focus()")
    opened.key("p")
    assert text(opened, "#moment") == f"At the peak: {human_bytes(EAGER.peak)}"
    opened.key("ArrowRight")
    after = EAGER.peak_at + 1
    assert (
        text(opened, "#moment")
        == f"At event {after - first_event(EAGER)}: {human_bytes(EAGER.bytes[after])}"
    )
    value = opened.run("document.querySelector('#timeline').getAttribute('aria-valuetext')")
    assert value.startswith(human_bytes(EAGER.bytes[after]))
    opened.key("+")
    near = view(opened)
    assert near[1] - near[0] < whole[1] - whole[0]
    opened.key("End")
    assert view(opened)[1] == whole[1]
    opened.key("0")
    assert view(opened) == whole


@needs_browser
def test_the_other_lifetimes_and_hidden_categories(opened):
    click(opened, "[data-timeline=program]")
    assert text(opened, "#peak").startswith(f"Peak of program: {Peak.of(PROGRAM).words()}")
    assert text(opened, "#moment") == f"At the peak: {human_bytes(PROGRAM.peak)}"
    click(opened, "[data-timeline=eager]")
    click(opened, "[data-category='optimizer state']")
    x, y, width, height = opened.box("#timeline")
    opened.mouse("mouseMoved", x + width / 2, y + height / 2)
    said = text(opened, "#memory-tooltip")
    event = int(re.search(r"At event (\d+)", text(opened, "#moment")).group(1)) + first_event(EAGER)
    assert f"{human_bytes(EAGER.bytes[event] - (32 << 20))} shown" in said


@needs_browser
def test_the_schedule_tells_and_zooms(opened):
    x, y, width, _ = opened.box("#streams")
    assert "compute waits 15.0 ms for communication (22%)" in text(opened, "#schedule-summary")
    opened.mouse("mouseMoved", x + 150 + (width - 160) * 0.25, y + 17)
    said = text(opened, "#schedule-tooltip")
    assert "mm_" in said and "phase forward" in said and "module layers." in said
    opened.mouse("mouseMoved", x + 155, y + 17)
    assert text(opened, "#schedule-tooltip") == "waits 7.00 ms for communication"
    opened.mouse("mouseMoved", x + 155, y + 51)
    assert "all_gather_into_tensor" in text(opened, "#schedule-tooltip")
    assert "sends 32.0 MiB per rank" in text(opened, "#schedule-tooltip")
    before = view(opened, "#streams")
    opened.mouse("mouseWheel", x + width / 2, y + 17, deltaX=0, deltaY=-200)
    after = view(opened, "#streams")
    assert before[0] < after[0] < after[1] < before[1]


@needs_browser
def test_tables_and_facts_are_text(opened):
    cells = opened.run("[...document.querySelectorAll('#tables td')].map(c => c.innerText)")
    assert cells == ["all-gather", "8", "3.00 GiB", "250 ms", "yes", "", "1.00 ms", "no", HOSTILE]
    facts = opened.run("[...document.querySelectorAll('#facts dd')].map(c => c.innerText)")
    assert facts == [HOSTILE, "16,384", "80.0 GiB"]


@needs_browser
def test_100_000_events_in_the_dark_on_a_small_screen(browser, tmp_path):
    eager, program = large()
    path = tmp_path / "large.html"
    write_page(path, timelines=[eager, program], spans=schedule_of(126, small=100))
    assert len(eager.events) > 100_000 and path.stat().st_size < 5 << 20
    browser.complaints.clear()
    browser.open(path, 420, 800, "dark")
    assert text(browser, "#peak").startswith(f"Peak of eager: {Peak.of(eager).words()}")
    x, y, width, height = browser.box("#timeline")
    assert width < 420
    for _ in range(14):
        browser.mouse("mouseWheel", x + width / 2, y + height / 2, deltaX=0, deltaY=-300)
    start, end = view(browser)
    assert 8 <= end - start <= 9
    event = int(re.search(r"At event ([\d,]+)", text(browser, "#moment")).group(1).replace(",", ""))
    event += first_event(eager)
    assert start <= event < end
    assert f"{human_bytes(eager.bytes[event])} in all" in text(browser, "#memory-tooltip")
    assert not browser.run("document.documentElement.scrollWidth > innerWidth")
    assert browser.complaints == []


@needs_browser
def test_the_page_of_a_captured_step(browser, tmp_path):
    eager, program, time = real()
    path = tmp_path / "real.html"
    browser.complaints.clear()
    write_page(path, timelines=[program, eager], spans=time.spans)
    browser.open(path)
    assert text(browser, "#peak").startswith(f"Peak of program: {Peak.of(program).words()}")
    wait = f"compute waits {human_seconds(time.exposed)} for communication"
    assert wait in text(browser, "#schedule-summary")
    click(browser, "[data-timeline=eager]")
    browser.run("document.querySelector('#timeline').focus()")
    for event in range(eager.peak_at + 1, eager.peak_at + 20):
        browser.key("ArrowRight")
        op = eager.ops[eager.events[event].op]
        said = text(browser, "#memory-tooltip")
        assert f"{human_bytes(eager.bytes[event])} in all" in said
        assert f"op {op.name}" in said and f"phase {op.phase}" in said
        assert (f"module {op.module}" in said) == bool(op.module)
    assert browser.complaints == []


@needs_browser
def test_a_page_of_tables_alone(browser, tmp_path):
    path = tmp_path / "tables.html"
    browser.complaints.clear()
    write_page(path, tables=[Table("Sweep", ["batch"], [])])
    browser.open(path)
    assert browser.run("document.querySelector('#memory').hidden")
    assert browser.run("document.querySelector('#schedule').hidden")
    assert browser.complaints == []


@needs_browser
def test_one_allocation_and_a_schedule_that_takes_no_time(browser, tmp_path):
    maker = Maker()
    maker.make(1 << 20, Category.INPUTS, "x")
    path = tmp_path / "one.html"
    browser.complaints.clear()
    write_page(path, timelines=[maker.timeline("eager")], spans=[Span("compute", "view", 0.0, 0.0)])
    browser.open(path)
    assert (
        text(browser, "#peak") == "Peak of eager: 1.00 MiB before the step: inputs 1.00 MiB (100%)."
    )
    for canvas in ("#timeline", "#streams"):
        x, y, width, _ = browser.box(canvas)
        browser.mouse("mouseMoved", x + width / 2, y + 20)
        browser.mouse("mouseWheel", x + width / 2, y + 20, deltaX=0, deltaY=-300)
    assert view(browser) == (0, 1)
    assert browser.complaints == []


def test_a_page_loads_nothing_and_lets_nothing_load():
    found = page("Plan", [EAGER])
    assert "default-src 'none'" in found
    assert not re.search(r"(src|href)=\"(?!data:)", found) and "@import" not in found
    assert not re.search(r"https?://", found)
    assert "fetch(" not in found and "XMLHttpRequest" not in found


def test_titles_are_escaped():
    assert "</script><script>alert" not in page(HOSTILE, [EAGER])


def test_nothing_to_show_is_refused(tmp_path):
    with pytest.raises(PictureError, match=r"The page `Plan` would be empty: .*memory=True"):
        write_page(tmp_path / "plan.html", title="Plan")
    with pytest.raises(
        PictureError, match=r"Give one number per event, as simulate\(timeline\)\.bytes does"
    ):
        write_page(tmp_path / "plan.html", timelines=[EAGER], reserved={"eager": [5]})
    assert not (tmp_path / "plan.html").exists()
