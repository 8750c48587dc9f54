"""`simulate`: against runs of torch's own allocator, its published facts, and what must hold of any allocator.

`allocator_runs.json` was recorded from the allocator in the CUDA build of torch 2.13.0, on a CUDA runtime that only
counts bytes (`python -m benchmarks.allocator_truth --record`). Every event's numbers and the last blocks are in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functionalize.cost.categories import Category
from functionalize.errors import AllocatorSettingsError, PlannedOutOfMemoryError
from functionalize.planner.allocator.alloc_conf import MIB
from functionalize.planner.allocator.allocator import (
    CachingAllocator,
    Reserved,
    Settings,
    fsdp2_streams,
    simulate,
)
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Event, Op, Timeline
from tests.planner.timelines import large, step_of

RUNS = json.loads((Path(__file__).parent / "allocator_runs.json").read_text())
EXPANDABLE = Settings(expandable_segments=True)


def allocation(nbytes: int, name: str = "t") -> Allocation:
    return Allocation(nbytes, Category.TEMPORARIES, name, 0, None, 0)


def timeline(steps: Sequence[Sequence[int]]) -> tuple[Timeline, Callable[[Allocation], int]]:
    """[nbytes, stream] allocates; [-n] frees the n-th allocation. An op per event."""
    made: list[Allocation] = []
    streams: dict[int, int] = {}
    events = []
    for i, step in enumerate(steps):
        if step[0] >= 0:
            made.append(allocation(step[0], f"t{i}"))
            streams[id(made[-1])] = step[1]
        events.append(Event(i, made[-1] if step[0] >= 0 else made[-step[0] - 1], step[0] >= 0))
    ops = [Op(f"op{i}", "forward", "layers.0") for i in range(len(steps))]
    return Timeline("eager", ops, made, events), lambda each: streams[id(each)]


def run(*sizes: int, conf: Settings | None = None) -> Reserved:
    """Positive sizes are allocated; -n frees the n-th of them."""
    return simulate(timeline([[size, 0] for size in sizes])[0], conf)


def blocks(reserved: Reserved) -> list[list[int]]:
    """The sizes of the blocks of each segment; free ones are negative."""
    return [[b.nbytes if b.owner else -b.nbytes for b in s.blocks] for s in reserved.segments]


# -- torch's own allocator -------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", RUNS, ids=[f"{i}-{r['options']}" for i, r in enumerate(RUNS)])
def test_torch_reserves_the_same_after_every_event(recorded: dict[str, Any]) -> None:
    whole = recorded["events"]
    conf = Settings.parse(recorded["options"], recorded["limit"])
    done, stream_of = timeline(whole[: len(recorded["reserved"])])
    found = simulate(done, conf, stream_of)
    assert found.bytes == recorded["reserved"]
    assert found.allocated == recorded["allocated"]
    if recorded["out_of_memory"]:  # torch has emptied its cache before it gave up
        refused, stream_of = timeline(whole[: len(recorded["reserved"]) + 1])
        with pytest.raises(PlannedOutOfMemoryError, match=rf"at op {len(recorded['reserved'])}, "):
            simulate(refused, conf, stream_of)
        return
    assert found.retries == recorded["retries"]
    assert [
        [
            s.nbytes,
            s.stream,
            s.small,
            s.expandable,
            [[b.nbytes, b.owner is not None] for b in s.blocks],
        ]
        for s in found.segments
    ] == recorded["segments"]


def test_the_recorded_runs_reach_what_is_rare() -> None:
    assert any(r["retries"] and not r["out_of_memory"] and "True" not in r["options"] for r in RUNS)
    assert any(r["retries"] and not r["out_of_memory"] and "True" in r["options"] for r in RUNS)
    assert any(r["out_of_memory"] for r in RUNS)
    shrinks = [r for r in RUNS if any(b < a for a, b in pairwise(r["reserved"]))]
    assert any("garbage" in r["options"] for r in shrinks)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # the rest is too small to be split off
        (31 * MIB + 1, 32 * MIB, 32 * MIB),
    ],
)
def test_requests_are_rounded_and_packed(nbytes: int, block: int, segment: int) -> None:
    found = run(nbytes)
    assert (found.allocated, found.bytes) == ([block], [segment])


def test_an_expandable_segment_grows_by_pages() -> None:
    assert run(30 * MIB, conf=EXPANDABLE).bytes == [40 * MIB]
    assert run(30 * MIB, 30 * MIB, conf=EXPANDABLE).bytes == [40 * MIB, 60 * MIB]
    assert blocks(run(30 * MIB, 30 * MIB, -1, conf=EXPANDABLE)) == [[-30 * MIB, 30 * MIB]]
    assert run(512, 1 * MIB, 1 * MIB, conf=EXPANDABLE).bytes == [2 * MIB, 2 * MIB, 4 * MIB]


def test_a_free_block_that_can_grow_serves_what_no_segment_could() -> None:
    grown = (40 * MIB, -1, 50 * MIB)
    assert run(*grown).peak == 90 * MIB
    assert run(*grown, conf=EXPANDABLE).peak == 60 * MIB


def test_best_fit_takes_the_smallest_block_and_the_lowest_of_these() -> None:
    found = run(40 * MIB, 24 * MIB, 24 * MIB, -2, -3, -1, 22 * MIB)
    assert blocks(found) == [[-40 * MIB], [22 * MIB, -2 * MIB], [-24 * MIB]]


def test_blocks_that_must_not_be_split_serve_only_what_nearly_fills_them() -> None:
    sizes = (60 * MIB, -1, 30 * MIB)
    assert blocks(run(*sizes, conf=Settings(max_split_size=20 * MIB))) == [[-60 * MIB], [30 * MIB]]
    loose = Settings(max_split_size=20 * MIB, max_non_split_rounding=40 * MIB)
    assert blocks(run(*sizes, conf=loose)) == [[60 * MIB]]


def test_neighbours_merge_when_they_are_freed() -> None:
    three = run(4 * MIB, 4 * MIB, 4 * MIB, -1, -3)
    assert blocks(three) == [[-4 * MIB, 4 * MIB, -12 * MIB]]
    assert blocks(run(4 * MIB, 4 * MIB, 4 * MIB, -1, -3, -2)) == [[-20 * MIB]]


def test_streams_do_not_share_blocks() -> None:
    steps = [[30 * MIB, 0], [-1], [30 * MIB, 1]]
    assert simulate(timeline(steps)[0]).peak == 30 * MIB
    assert simulate(*_apart(steps)).peak == 60 * MIB


def _apart(steps: list[list[int]]) -> tuple[Timeline, Settings, Callable[[Allocation], int]]:
    made, stream_of = timeline(steps)
    return made, Settings(), stream_of


def test_a_request_of_nothing_gets_no_block() -> None:
    found = run(0, 512, -1)
    assert found.allocated == [0, 512, 512]
    assert blocks(found) == [[512, -(2 * MIB - 512)]]


def test_an_empty_timeline() -> None:
    found = run()
    assert (
        found.peak,
        found.peak_at,
        found.peak_allocated,
        found.fragmentation,
        found.segments,
    ) == (0, 0, 0, 0, ())


# -- a training step -------------------------------------------------------------------------------


@pytest.mark.parametrize("conf", [Settings(), EXPANDABLE])
@pytest.mark.parametrize("streams", [None, fsdp2_streams])
def test_a_step_at_its_peak(conf: Settings, streams: Any) -> None:
    step = step_of(4)[0]
    found = simulate(step, conf, streams)
    assert all(
        r >= a >= b for r, a, b in zip(found.bytes, found.allocated, step.bytes, strict=True)
    )
    segments = found.segments_at(found.peak_at)
    assert sum(s.nbytes for s in segments) == found.peak == max(found.bytes)
    used = [b for s in segments for b in s.blocks if b.owner is not None]
    assert {id(b.owner) for b in used} == {id(each) for each in step.live_at(found.peak_at)}
    assert sum(b.nbytes for b in used) == found.allocated[found.peak_at]
    assert 0 <= found.fragmentation <= found.peak - found.allocated[found.peak_at]
    assert {s.stream for s in segments} == ({0} if streams is None else {0, 1, 2})


def test_the_second_step_reserves_no_more_than_the_first() -> None:
    """What a step frees serves the next one: a fact of the allocator on which warm-up steps rest."""
    sizes = (30 * MIB, 3 * MIB, -1, 512, 30 * MIB, -2, -3, -4)
    once, twice = run(*sizes), run(*sizes, *(size if size > 0 else size - 4 for size in sizes))
    assert once.peak == twice.peak


def test_a_hundred_thousand_events() -> None:
    step = large()[0]
    found = simulate(step)
    assert len(step.events) > 100_000
    assert (
        step.peak <= found.peak_allocated < step.peak + 512
    )  # of all, only the generator's state is rounded
    assert found.peak >= found.peak_allocated


# -- any allocator ---------------------------------------------------------------------------------

CONFS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "roundup_power2_divisions:4",
        "large_segment_size_mb:12,expandable_segments:True",
    ]
)
STEPS = st.lists(
    st.tuples(st.integers(0, 23), st.integers(0, 1023), st.integers(0, 1), st.booleans()),
    min_size=1,
    max_size=60,
)


def drawn(given: list[tuple[int, int, int, bool]]) -> list[list[int]]:
    """Steps of a timeline; the last field says to free something, where there is something."""
    steps: list[list[int]] = []
    live: list[int] = []
    made = 0
    for power, more, stream, frees in given:
        if frees and live:
            steps.append([-live.pop(more % len(live)) - 1])
        else:
            steps.append([(1 << power) + more, stream])
            live.append(made)
            made += 1
    return steps


@settings(max_examples=60, deadline=None)
@given(CONFS, STEPS)
def test_blocks_tile_their_segments(options: str, steps: list[tuple[int, int, int, bool]]) -> None:
    made, stream_of = timeline(drawn(steps))
    found = simulate(made, Settings.parse(options), stream_of)
    for event in (len(made.events) // 2, len(made.events) - 1):
        segments = found.segments_at(event)
        assert sum(s.nbytes for s in segments) == found.bytes[event]
        held: list[int] = []
        for segment, after in zip(segments, (*segments[1:], None), strict=True):
            address = segment.address
            for block in segment.blocks:  # without a gap, and so without an overlap
                assert block.address == address
                assert block.nbytes >= block.requested
                address += block.nbytes
                if block.owner is not None:
                    held.append(id(block.owner))
                    assert stream_of(block.owner) == segment.stream
            assert address == segment.address + segment.nbytes
            assert after is None or after.address >= address
            frees = [block.owner is None for block in segment.blocks]
            assert not any(a and b for a, b in pairwise(frees))
        assert sorted(held) == sorted(id(each) for each in made.live_at(event))
    assert all(
        r >= a >= b for r, a, b in zip(found.bytes, found.allocated, made.bytes, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(CONFS, STEPS)
def test_when_all_is_freed_every_segment_is_one_free_block(
    options: str, steps: list[tuple[int, int, int, bool]]
) -> None:
    conf = Settings.parse(options)
    machine = CachingAllocator(conf)
    live = []
    for size, *stream in (step for step in drawn(steps) if step[0] > 0):
        live.append(machine.malloc(size, stream[0], allocation(size)))
    for block in live[::2] + live[1::2]:
        assert block is not None
        machine.free(block)
    assert machine.allocated == 0
    assert all(len(s.blocks) == 1 and s.blocks[0].owner is None for s in machine.segments())
    if conf.expandable_segments:  # one segment per stream and kind, however much was asked for
        kinds = [(s.stream, s.small) for s in machine.segments()]
        assert len(kinds) == len(set(kinds))
    machine.empty_cache()
    assert (machine.reserved, machine.segments()) == (0, ())
    again = machine.malloc(5 * MIB, 0, allocation(5 * MIB))
    assert again is not None and machine.reserved == conf.segment_for(5 * MIB)


def test_emptying_the_cache_unmaps_whole_pages_only() -> None:
    machine = CachingAllocator(EXPANDABLE)
    live = [machine.malloc(n * MIB, 0, allocation(n * MIB)) for n in (15, 50, 15)]
    assert machine.reserved == 80 * MIB and live[1] is not None
    machine.free(live[1])
    machine.empty_cache()
    assert [(s.nbytes, len(s.blocks)) for s in machine.segments()] == [(20 * MIB, 2), (20 * MIB, 2)]
    assert machine.malloc(45 * MIB, 0, allocation(45 * MIB)) is not None
    assert machine.reserved == 80 * MIB  # the gap is mapped again
    assert [action.kind for action in machine.log if action.kind.startswith("segment")] == [
        *("segment_map",) * 2,
        "segment_unmap",
        "segment_map",
    ]


# -- settings --------------------------------------------------------------------------------------


def test_settings_are_read_as_torch_reads_them() -> None:
    """The cases of torch's own `test/cpp/c10/AllocatorConfig_test.cpp`."""
    text = "max_split_size_mb:40, max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
    text += "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True,"
    conf = Settings.parse(text + "pinned_use_background_threads:True")
    assert (conf.max_split_size, conf.max_non_split_rounding) == (40 * MIB, 30 * MIB)
    assert (conf.large_segment, conf.garbage_collection_threshold) == (20 * MIB, 0.5)
    assert conf.expandable_segments
    assert conf.divisions == (8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1)
    conf = Settings.parse("roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]")
    assert conf.divisions[6:] == (8, 8, 16, 1, 0, 8, 2, 2, 2, 2)
    assert Settings.parse("roundup_power2_divisions:4").divisions == (4,) * 16
    assert Settings.parse("large_segment_size_mb:15,max_split_size_mb:20").large_segment == 15 * MIB
    assert Settings.parse("expandable_segments:False,") == Settings.parse("") == Settings()
    assert Settings.parse("per_process_memory_fraction:0.5", limit=100).allowed == 50
    assert Settings(limit=100).allowed is None


def test_divisions_of_a_power_of_two() -> None:
    conf = Settings.parse("roundup_power2_divisions:4")
    assert [conf.rounded(n) for n in (1200, 3000, 4096, 84 * MIB)] == [1536, 3072, 4096, 96 * MIB]
    assert conf.rounded(100 * MIB) == 112 * MIB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "`max_split_size_mb:19` cannot be used: give at least 20 MiB"),
        (
            "large_segment_size_mb:40,max_non_split_rounding_mb:30",
            "give at least 40 MiB (`large_segment_size_mb`)",
        ),
        ("large_segment_size_mb:10", "give a whole number of MiB, at least 11."),
        ("garbage_collection_threshold:1", "give a number between 0 and 1."),
        ("garbage_collection_threshold:half", "give a number between 0 and 1."),
        (
            "roundup_power2_divisions:3",
            "`roundup_power2_divisions:3` cannot be used: give powers of two.",
        ),
        (
            "roundup_power2_divisions:[60:4]",
            "`roundup_power2_divisions:60` cannot be used: give powers of two.",
        ),
        ("expandable_segments:true", "give `True` or `False`."),
        ("expandable_segments", "write `option:value,option:value`, a list as `[a:b,c:d]`."),
        ("roundup_power2_divisions:[64:8", "write `option:value,option:value`"),
        (
            "foo:1",
            "`foo` cannot be used: torch has no such option; it has expandable_segments, max_split_size_mb,",
        ),
        ("backend:cudaMallocAsync", "only torch's native allocator is simulated: leave it out."),
    ],
)
def test_settings_that_torch_refuses(text: str, message: str) -> None:
    with pytest.raises(AllocatorSettingsError) as caught:
        Settings.parse(text)
    assert message in str(caught.value)


# -- limits ----------------------------------------------------------------------------------------


def test_a_limit_releases_the_cache_before_it_refuses() -> None:
    found = run(40 * MIB, -1, 60 * MIB, conf=Settings(limit=64 * MIB))
    assert (found.bytes, found.retries) == ([40 * MIB, 40 * MIB, 60 * MIB], 1)


def test_a_limit_releases_oversize_blocks_first() -> None:
    sizes = (40 * MIB, 24 * MIB, 3 * MIB, -1, -2, -3, 60 * MIB)
    found = run(*sizes, conf=Settings(limit=120 * MIB, max_split_size=20 * MIB))
    assert (found.bytes[-2:], found.retries) == ([84 * MIB, 80 * MIB], 0)  # 40 and 24 are enough
    without = run(*sizes, conf=Settings(limit=120 * MIB))
    assert (without.bytes[-2:], without.retries) == ([84 * MIB, 60 * MIB], 1)


def test_out_of_memory_says_what_when_and_why() -> None:
    sizes = (30 * MIB, 20 * MIB, 20 * MIB, -1, -3, 50 * MIB)
    with pytest.raises(PlannedOutOfMemoryError) as caught:
        run(30 * MIB, 3 * MIB, 40 * MIB, -3, 50 * MIB, conf=Settings(limit=90 * MIB))
    assert str(caught.value) == (
        "Out of memory at op 4, op4 in layers.0: t4 (temporaries, 50.00 MiB) needs 50.00 MiB more on stream 0, and the "
        "limit is 90.00 MiB. Reserved are 50.00 MiB, of which 33.00 MiB are allocated (33.00 MiB as requested) and "
        "17.00 MiB are free, but split, on another stream, or too small. It would fit without fragmentation: try "
        "expandable_segments:True."
    )
    assert run(*sizes, conf=Settings(limit=90 * MIB)).peak == 70 * MIB
    later = (30 * MIB, 3 * MIB, 40 * MIB, -3, 50 * MIB, 20 * MIB)  # a peak of 103 MiB comes later
    with pytest.raises(PlannedOutOfMemoryError, match=r"op 4, .* Use a smaller batch, more ranks"):
        run(*later, conf=Settings(limit=90 * MIB))


def test_out_of_memory_before_the_step() -> None:
    weights = Allocation(3 << 30, Category.SHARDED_PARAMETERS, "w", BEFORE, None, BEFORE)
    made = Timeline("eager", [], [weights], [Event(BEFORE, weights, True)])
    with pytest.raises(PlannedOutOfMemoryError) as caught:
        simulate(made, Settings(limit=1 << 30))
    assert (
        "Out of memory before the step: w (sharded parameters, 3.00 GiB) needs 3.00 GiB more"
        in str(caught.value)
    )
    assert str(caught.value).endswith(
        "Use a smaller batch, more ranks, checkpointing, or a larger limit."
    )
