"""Searches on small steps: the answer applied on real ranks, what is composed against plans, errors by name."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import functionalize as fz
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import FunctionalizeError, TuneError
from functionalize.planner.sweep.changes import change
from functionalize.planner.sweep.training import Training
from functionalize.planner.timeline.timeline import EAGER
from functionalize.planner.tuning.policy import EagerPolicy, LayerPolicy
from functionalize.planner.tuning.space import Setting, Space
from functionalize.planner.tuning.variants import device_mesh, layers_of
from tests.planner.tuning import training
from tests.planner.tuning.training import build, build_split, inputs, step
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

LIMIT = 2_200_000


def tuned(**given):
    given = {"world": 2, "limit": LIMIT, "target": "cpu", "batches": [4], **given}
    return fz.tune(build, step, inputs=inputs, **given)


@pytest.fixture(scope="module")
def found():
    return tuned(batch_tokens=2048)


def least(expected, read):
    """The least of several readings, of each figure, until the first rank has read what is expected.

    Gloo's threads, which may be late with what they free, only add.
    """
    found = read()
    for _ in range(12):
        late = torch.tensor(float(found != expected))
        dist.broadcast(late, 0)
        if not late:
            break
        found = tuple(map(min, found, read()))
    return found


def on_real_ranks(policy, code, pipeline, peak, program_peak):
    """The peaks of this rank: eager with `apply`, eager with the printed code, the captured step, its program."""
    peaks = []
    written = {}
    exec(compile(code, "policy.py", "exec"), written)
    for apply in (policy.apply, written["apply"]):
        model, optimizer = build(mesh=device_mesh(policy.mesh))
        apply(model)
        recorded = fz.record_memory(step)

        def of_eager(recorded=recorded, model=model, optimizer=optimizer):
            recorded(model, optimizer, *inputs(policy.batch, policy.accumulate))
            return (recorded.memory.peak,)

        of_eager()  # makes the optimizer's states
        peaks += least((peak,), of_eager)

    def of_capture():
        model, optimizer = build(mesh=device_mesh(policy.mesh))
        policy.apply(model)
        captured = fz.capture(step, memory=True, passes=pipeline)
        while captured.memory is None:
            captured(model, optimizer, *inputs(policy.batch, policy.accumulate))
        return captured.memory.eager.peak, captured.memory.program.peak

    return [*peaks, *least((peak, program_peak), of_capture)]


def test_the_answer_has_the_predicted_peak_on_real_ranks(found) -> None:
    assert any(each.saved for each in found.policy.layers.values())  # of some ops
    assert found.policy.accumulate == 2 and found.pipeline == "default"
    (first, _) = run_on_ranks(
        on_real_ranks,
        found.policy,
        found.policy.code(),
        found.pipeline,
        *(found.peak, found.program_peak),
    )
    assert first == [found.peak, found.peak, found.peak, found.program_peak]


def test_the_best_is_faster_than_what_fits_by_hand(found) -> None:
    by_hand = fz.plan(
        build,
        step,
        grid={"reshard": [True, False], "checkpoint": [True, False]},
        inputs=inputs,
        world=2,
        target="cpu",
        batch=4,
        accumulate=2,
    )
    rows = [(p.figures.memory.levels(EAGER).device, p.figures.time.seconds) for p in by_hand.plans]
    fitting = [seconds for nbytes, seconds in rows if nbytes <= LIMIT]
    assert len(fitting) == 2 and found.best.seconds < min(fitting)
    assert found.best.plan.figures.memory.fit(LIMIT, EAGER).refused is None
    # What was composed for the same four is what they are planned with.
    composed = [
        (c.composed.peak, c.composed.seconds)
        for c in found.candidates
        if len(set(c.policy.layers.values())) == 1
        and all(not p.saved for p in c.policy.layers.values())
    ]
    for (peak, seconds), (nbytes, planned) in zip(sorted(composed), sorted(rows), strict=True):
        assert peak == pytest.approx(nbytes, rel=0.03)
        assert seconds == pytest.approx(planned, rel=0.05)


def test_the_text_and_the_rows(found) -> None:
    text = found.text()
    assert text.startswith("2,048 tokens a step on 2 ranks of 2.10 MiB")
    assert "why the next ones lost" in text and "does not fit" in text and "recomputation" in text
    assert "1 whole ones" in text and "captured, passes='default'" in text
    narrow = found.text(width=90).splitlines()
    heads = found.text().splitlines()[1]
    assert "exposed" in heads and "recomputed" in heads and "MFU" in heads
    assert narrow[1].split() == ["setting", "layers", "peak", "step", "(modelled)", "tokens/s/rank"]
    run = found.over(Training(1e9, price=3.0))
    days, cost = (run.row(run.best)[name] for name in ("days", "cost"))
    assert days == pytest.approx(1e9 / (found.best.throughput * 2) / 86_400)
    assert cost == pytest.approx(days * 24 * 2 * 3.0) and "days" in run.text()
    mfu = found.best.plan.figures.time.mfu
    assert found.row(found.best)["mfu"] == mfu
    slow = found.candidates[-1]
    assert found.row(slow)["mfu"] == pytest.approx(mfu * slow.throughput / found.best.throughput)
    data = json.loads(found.to_json())
    assert data["best"]["planned"] and data["best"]["peak"] == found.peak
    frontier = [(row["peak"], row["throughput"]) for row in data["frontier"]]
    assert frontier == sorted(frontier) and len(frontier) > 3
    assert [rate for _, rate in frontier] == sorted(rate for _, rate in frontier)
    assert repr(found).startswith("<Tuned: shard 2, batch 4 x 2, ")


def test_meshes_and_batches_are_searched() -> None:
    space = Space.of((build, inputs, step), 32, MACHINES["h100"], tokens=1 << 15)
    assert space.meshes == (
        (("shard", 32),),
        (("replicate", 4), ("shard", 8)),
        (("replicate", 2), ("shard", 16)),
    )
    settings = space.settings(space.places[0], 128, 32)
    assert [(s.batch, s.accumulate) for s in settings] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert space.reshards_on(space.meshes[0], 32) == (True, False, 8)
    assert space.reshards_on(space.meshes[1], 32) == (True, False)
    without = "offload: `build` has no parameter `offload` (True or False)"
    assert space.left_out == ("tensor parallelism: `tp` names no sizes of it", without)
    split = Space.of((build, inputs, step), 32, MACHINES["h100"], tp=[4])
    assert split.meshes[:3] == space.meshes and split.left_out == (without,)
    assert split.meshes[3:] == (
        (("shard", 8), ("tp", 4)),
        (("replicate", 4), ("shard", 2), ("tp", 4)),
        (("replicate", 2), ("shard", 4), ("tp", 4)),
    )


def test_tensor_parallelism_is_searched_where_the_model_splits_its_ops() -> None:
    """A model that takes the dimension for one more to shard over is named."""
    given = {"world": 2, "limit": LIMIT, "target": "cpu", "batches": [4], "batch_tokens": 2048}
    found = fz.tune(build_split, step, inputs=inputs, tp=[2], pipelines=[], **given)
    split = [each for each in found.candidates if dict(each.setting.mesh) == {"shard": 1, "tp": 2}]
    assert {each.setting.batch * each.setting.accumulate for each in split} == {16}
    assert {each.items for each in split} == {1024.0}  # two ranks train on the same 2,048 tokens
    other = fz.tune(build, step, inputs=inputs, tp=[2], pipelines=[], **given)
    assert "`build` shards parameters over the dimension `tp`" in other.text()
    assert other.policy.mesh == {"shard": 2} and other.facts.failed.keys() == {"shard 1 x tp 2"}
    assert "planned whole" not in other.text()


def test_a_mesh_that_the_script_does_not_take_is_named() -> None:
    def picky(mesh=None):
        if len(mesh.shape) > 1:
            raise ValueError("one dimension, please")
        return build(mesh=mesh)

    found = fz.tune(
        picky, step, inputs=inputs, world=4, limit=LIMIT, target="cpu", batches=[4], pipelines=[]
    )
    assert found.facts.failed == {"replicate 2 x shard 2": "ValueError: one dimension, please"}
    assert "planned whole" not in found.text()


def plain_build():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain_step(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_a_script_does_not_parametrise_is_named() -> None:
    found = fz.tune(
        plain_build,
        plain_step,
        inputs=lambda batch=1: torch.randn(batch, 16),
        world=1,
        limit=40_000,
        target="cpu",
        pipelines=[],
    )
    left_out = "\n".join(found.facts.left_out)
    assert "mesh: `build` has no parameter `mesh`" in left_out
    assert "batches above" not in left_out
    assert "accumulation: no function has" in left_out and "layers: `build` returns no" in left_out
    assert found.best.setting.batch > 1 and found.pipeline is None and not found.policy.layers
    assert found.kind == "samples"


def test_the_end_of_doubling_is_named() -> None:
    found = fz.tune(
        plain_build,
        plain_step,
        inputs=lambda batch=1: torch.randn(batch, 16),
        world=1,
        limit=1e12,
        target="cpu",
        pipelines=[],
    )
    assert found.best.setting.batch == 2048
    assert "not searched: batches above 2,048, which may fit" in found.text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": "h10"}, "a limit is a number of bytes, or one of a100, h100"),
        ({"limit": 0}, "a limit is a number of bytes or the name of a machine, not 0"),
        (
            {"limit": 1e8, "target": "cuda"},
            "nothing fits in 95.4 MiB: context and workspaces alone",
        ),
        ({"world": 0}, "`world` is a positive whole number, not 0"),
        ({"batch_tokens": 1.5}, "`batch_tokens` is a positive whole number, not 1.5"),
        ({"batches": [0]}, r"`batches\[0\]` is a positive whole number, not 0"),
        ({"batch": 4}, "`batch` is an axis of the search and has no single value: set `batches`"),
        (
            {"passes": "default"},
            "`passes` is an axis of the search and has no single value: set `pipelines`",
        ),
        (
            {"checkpoint": True},
            "`checkpoint` is an axis of the search and has no single value: remove it",
        ),
        ({"pipelines": ["fly"]}, "no pass `fly`"),
        ({"pipelines": ["default,offload"]}, "`offload` cannot be planned"),
        ({"pipelines": "default"}, "`pipelines` is a list of pipelines, not 'default'"),
        ({"machine": "abacus"}, "no machine `abacus`"),
        (
            {"meshes": [{"shard": 3}]},
            "`meshes`: the sizes of {'shard': 3} do not multiply to the 2 ranks of the world",
        ),
        ({"tp": [3]}, "`tp` 3: sizes of tensor parallelism must divide the 2 ranks"),
        ({"tp": [0]}, r"`tp\[0\]` is a positive whole number, not 0"),
        (
            {"tp": [2], "meshes": [{"shard": 2}]},
            "`meshes` replaces them: remove `tp`, and add a last dimension `tp` to each",
        ),
        ({"flavour": 3}, "no function accepts `flavour`"),
        ({"offload": 3}, "`offload` is True, False or None, not 3"),
    ],
)
def test_options_are_refused_before_anything_is_recorded(monkeypatch, given, message) -> None:
    def unreachable(*args, **kwargs):
        raise AssertionError("recorded")

    monkeypatch.setattr(training, "Net", unreachable)
    with pytest.raises(FunctionalizeError, match=message):
        tuned(**given)


def test_axes_that_the_functions_lack_are_refused() -> None:
    given = {"world": 1, "limit": 1e9, "target": "cpu"}
    for more, message in (
        (
            {"meshes": [{"shard": 1}]},
            r"`meshes` needs a parameter `mesh` \(a DeviceMesh\) of `build`",
        ),
        (
            {"batches": [1]},
            "`batches` needs a parameter `batch` of `inputs` or `step`: add the parameter, or",
        ),
        (
            {"batch_tokens": 64},
            "`batch_tokens` needs a parameter `batch` or `accumulate` of `inputs`",
        ),
        ({"offload": True}, r"`offload` needs a parameter `offload` \(True or False\) of `build`"),
        ({"tp": [2]}, r"`tp` needs a parameter `mesh` \(a DeviceMesh\) of `build`: add"),
    ):
        with pytest.raises(TuneError, match=message):
            fz.tune(plain_build, plain_step, inputs=lambda: torch.randn(1, 16), **given, **more)
    with pytest.raises(TuneError, match="`step` is a function, not int"):
        fz.tune(plain_build, 3, **given)


def test_a_limit_in_which_nothing_fits() -> None:
    with pytest.raises(
        TuneError, match=r"nothing fits in 0.98 KiB: of 1 configurations the one that"
    ):
        fz.tune(
            plain_build,
            plain_step,
            inputs=lambda: torch.randn(1, 16),
            world=1,
            limit=1e3,
            target="cpu",
        )
    with pytest.raises(
        TuneError,
        match="`batch_tokens` 100 is less than one sample of 128 on each of 2 ranks: raise",
    ):
        tuned(batch_tokens=100)
    with pytest.raises(
        TuneError, match="less than one sample of 128 on each of 4 ranks"
    ):  # on no mesh
        tuned(batch_tokens=100, world=4)
    space = Space((None,), (None,), (True,), True, True, (3, 5), 64, ())
    with pytest.raises(
        TuneError, match=r"`batches` \(3, 5\): none divides the 32 samples of a rank"
    ):
        space.settings(Setting(None), 1, 2)


def test_a_policy_is_applied_once_and_to_its_model() -> None:
    policy = EagerPolicy(layers={"0": LayerPolicy(())})
    model = nn.Sequential(nn.Linear(2, 2))
    policy.apply(model)
    with pytest.raises(TuneError, match="a policy was applied to this model before"):
        policy.apply(model)
    with pytest.raises(TuneError, match=r"the model has no module `blocks\.7`"):
        EagerPolicy(layers={"blocks.7": LayerPolicy(())}).apply(nn.Linear(2, 2))


def test_resharding_to_some_ranks_is_printed_and_applied() -> None:
    layers = {"blocks.0": LayerPolicy(None, 2), "blocks.1": LayerPolicy((), False)}
    policy = EagerPolicy(1, 1, {"shard": 4}, layers)
    code = policy.code()
    assert "set_reshard" in code and "RESHARD = {'blocks.0': 2, 'blocks.1': False}" in code
    with fz.world(4, target="cpu"):
        applied, printed, by_hand = (build(layers=2)[0] for _ in range(3))
        policy.apply(applied)
        written = {}
        exec(compile(code, "policy.py", "exec"), written)
        written["apply"](printed)
        change(by_hand, reshard=2)
        sizes = [
            model.blocks[0]
            ._get_fsdp_state()
            ._fsdp_param_group.post_forward_mesh_info.shard_mesh_size
            for model in (applied, printed, by_hand)
        ]
        assert sizes == [2, 2, 2]
        assert "forward" in vars(layers_of(applied)["blocks.1"])


def test_a_forward_that_needs_every_layer_is_planned_whole(monkeypatch) -> None:
    def forward(self, tokens):
        x = self.embedding(tokens)
        for i in range(training.LAYERS):
            x = self.blocks[i](x)
        return self.head(x).float().mean()

    monkeypatch.setattr(training.Net, "forward", forward)
    found = tuned(batch_tokens=1024, pipelines=[])
    assert any("its forward needs every layer (IndexError)" in why for why in found.facts.left_out)
    assert found.peak <= LIMIT and found.best.plan is not None


def test_a_step_that_cannot_be_captured_is_refused() -> None:
    seen = []

    def keeps(model, optimizer, x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        return len(seen)

    with pytest.raises(FunctionalizeError, match="cannot be captured"):
        fz.tune(
            plain_build, keeps, inputs=lambda: torch.randn(1, 16), world=1, limit=1e9, target="cpu"
        )
