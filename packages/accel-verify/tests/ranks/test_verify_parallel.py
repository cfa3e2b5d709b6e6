"""`accel verify-parallel` on real ranks: what is sound is green, and each of five faults is found by its name."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_core.errors import LaunchError
from accel_core.host.availability import has_module
from accel_core.host.versions import is_torch_version
from accel_testing import requires, world
from accel_verify.parallel.comparison import Finding, compare, own_draw
from accel_verify.parallel.layouts import RequestedLayout, requested_layout, requested_layouts
from accel_verify.parallel.records import RecordedRun, read_run
from accel_verify.parallel.run import VerifyRequest, check_one_process, variables_of, verdict_on, verify_parallel
from accel_verify.ranks import RanksEnded

HERE = Path(__file__).parent
VERIFIED = HERE / "verified.py"
NOISY_FAULT = "noisy_and_missing_reduction"
SHARDED = pytest.param("fsdp2", marks=requires("engine:fsdp"))


def _record(folder: str, steps: int, parts: int, counts: bool, target: str) -> None:
    """Record a target on a rank."""
    from accel_verify.parallel.recorder import main

    torch.seed()  # ranks are forked here, and begin with the generators of one process
    random.seed()
    if has_module("numpy"):
        importlib.import_module("numpy.random").seed()
    main([folder, str(steps), str(parts), str(int(counts)), target])


def recorded(
    folder: Path,
    target: str,
    layout: RequestedLayout | None = None,
    *,
    parts: int = 2,
    steps: int = 2,
    counts: bool = False,
) -> RecordedRun:
    """Run a target on the ranks of a layout, or on one process that reads as many parts."""
    folder.mkdir()
    variables = variables_of(("--cpu", *(layout.words if layout else ("--num-processes", "1"))), folder)
    ranks, parts = (1, parts) if layout is None else (layout.ranks, 0)
    world(ranks, environment=variables)(_record)(str(folder), steps, parts, counts, target)
    return read_run(folder)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The sound training on one process."""
    return recorded(tmp_path_factory.mktemp("one") / "process", f"{VERIFIED}:sound")


@pytest.mark.parametrize("name", ["dp2", SHARDED])
def test_a_sound_script_is_equal_on_two_ranks(one: RecordedRun, name: str, tmp_path: Path) -> None:
    """With accumulation, clipping, a schedule, dropout and metrics of uneven data, nothing differs."""
    ranks = recorded(tmp_path / "ranks", f"{VERIFIED}:sound", requested_layout(name))
    assert compare(one, ranks) == []
    assert [len(run.steps) for run in (one, ranks)] == [2, 2]
    assert ranks.loss(1) == pytest.approx(one.loss(1), rel=1e-6)
    assert ranks.metrics, "the evaluation after the last step is recorded"
    assert all(len(line["rows"]) == 2 for line in ranks.steps[0])


@pytest.mark.parametrize(
    ("fault", "kind", "where", "message"),
    [
        ("missing_reduction", "gradient", "`table.weight`", "a reduction over ranks is missing"),
        ("mask_dropped", "mask", "attention call 1", "it has no mask on rank 0, and on one process a mask of its own"),
        ("metrics_twice", "metrics", "gather, call 3", "samples are counted twice; 4 rows instead of 3"),
        ("equal_dropout", "dropout", "", "ranks 0 and 1 draw the same masks for different data"),
        ("stale_parameter", "update", "`head.bias`", "the optimizer holds another, stale parameter"),
    ],
)
def test_a_planted_fault_is_found(
    one: RecordedRun, fault: str, kind: str, where: str, message: str, tmp_path: Path
) -> None:
    """The first difference is the fault itself, in the first step where it can be seen."""
    findings = compare(one, recorded(tmp_path / "ranks", f"{VERIFIED}:{fault}", requested_layout("dp2")))
    assert findings, fault
    first: Finding = findings[0]
    assert (first.kind, first.where) == (kind, where), str(first)
    assert message in first.text, str(first)


@pytest.mark.parametrize("name", ["dp2", SHARDED])
def test_a_gradient_that_nobody_reduces_is_found(name: str, tmp_path: Path) -> None:
    """A layer that no engine knows is named in the first step, before the loss that it changes in the second."""
    alone = recorded(tmp_path / "one", f"{VERIFIED}:stray_head")
    findings = compare(alone, recorded(tmp_path / "ranks", f"{VERIFIED}:stray_head", requested_layout(name)))
    first: Finding = findings[0]
    assert (first.step, first.kind, first.where) == (1, "gradient", "parameter 0 of SGD"), str(first)
    assert "nobody reduces those of what was not prepared" in first.text
    assert first.certain


@pytest.mark.parametrize("layout", ["dp2", SHARDED])
@pytest.mark.parametrize("name", ["experts", "hooked", "factored", "whole"])
def test_what_sharding_may_lose_is_equal_or_refused(name: str, layout: str, tmp_path: Path) -> None:
    """Experts that differ by rank and optimizers that see whole matrices train as on one process."""
    given = f"{VERIFIED}:{name}"
    if layout == "fsdp2" and name in ("hooked", "factored"):
        with pytest.raises(pytest.fail.Exception, match="PreparationError"):
            recorded(tmp_path / "ranks", given, requested_layout(layout))
        ranks = read_run(tmp_path / "ranks")
        assert (ranks.refused, ranks.steps) == (True, [])
        assert {"hooked": "hooks of 0.experts.0.weight", "factored": "torch.Adafactor"}[name] in str(ranks.note)
        return
    if layout == "fsdp2" and is_torch_version("<", "2.13"):
        pytest.skip("before torch 2.13 FSDP2 refuses ranks that use different experts")
    alone, ranks = recorded(tmp_path / "one", given), recorded(tmp_path / "ranks", given, requested_layout(layout))
    assert compare(alone, ranks) == []
    assert [len(run.steps) for run in (alone, ranks)] == [2, 2]


WRONG = {
    "mixture": (("wrong_weight", "dropped_token"), "outputs differ first in `experts`"),
    "layers": (("swapped_labels",), ""),
}
"""Of a training, what may be wrong in it, and what is said then."""


@requires("engine:fsdp")
@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("mixture", "ep2"),
        ("layers", "pp2"),
        pytest.param("mixture", "fsdp2xep2", marks=pytest.mark.slow),
        pytest.param("layers", "pp2xfsdp2", marks=pytest.mark.slow),
    ],
)
def test_shared_parts_are_equal_and_their_faults_are_found(target: str, name: str, tmp_path: Path) -> None:
    """Experts and stages differ in nothing; wrong weights, a dropped token and swapped labels do in the first step."""
    layout = requested_layout(name)
    alone = recorded(tmp_path / "one", f"{VERIFIED}:{target}", parts=layout.parts)
    assert compare(alone, recorded(tmp_path / "ranks", f"{VERIFIED}:{target}", layout)) == []
    faults, told = WRONG[target]
    for fault in faults:
        findings = compare(alone, recorded(tmp_path / fault, f"{VERIFIED}:{target}_{fault}", layout))
        assert findings, fault
        assert findings[0].step == 1, str(findings[0])
        assert told in findings[0].text, str(findings[0])


def test_noise_of_each_rank_is_named_and_excuses_no_fault(one: RecordedRun, tmp_path: Path) -> None:
    """What ranks draw by themselves makes losses incomparable, on that line; a missing reduction stays a difference."""
    (layout,) = requested_layouts("dp2")
    ranks = {name: recorded(tmp_path / name, f"{VERIFIED}:{name}", layout) for name in ("noisy", NOISY_FAULT)}
    alone = recorded(tmp_path / "one", f"{VERIFIED}:noisy")
    excused, found = (
        verdict_on(request_in(tmp_path), layout, alone, ended(tmp_path, 0), run) for run in ranks.values()
    )
    line = next(n for n, text in enumerate(VERIFIED.read_text().splitlines(), 1) if "torch.randn_like(" in text)
    assert str(excused).startswith("dp2 is not comparable: rank 0 draws random numbers at "), excused
    assert f"verified.py:{line} that one process does not draw. Draw them per sample" in str(excused)
    assert found.state == "differs"
    assert "a reduction over ranks is missing" in str(found.findings)
    assert own_draw(one, one, 2) is None


UNSEEDED = """
import random
import torch
from torch.utils.data import DataLoader
from accel_core.accelerator import Accelerator

def seed():
    random.seed(0)
    torch.manual_seed(0)

accelerator = Accelerator()
data = torch.linspace(-1, 1, 64).view(16, 4)
model = torch.nn.utils.skip_init(torch.nn.Linear, 4, 1)
torch.nn.init.constant_(model.weight, 0.5)
torch.nn.init.constant_(model.bias, 0.5)
shuffle = False
{case}
loader = DataLoader(data, batch_size=2, shuffle=shuffle)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
NUMPY = "import numpy; data = torch.as_tensor({}, dtype=torch.float32)"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("torch.rand(3); random.random(); model = torch.nn.Sequential(model, torch.nn.Dropout())", None),
        ("seed(); data = torch.rand(16, 4); shuffle = True; data = data[random.sample(range(16), 16)]", None),
        ("data = torch.rand(16, 4); seed()", "`torch.rand` at "),
        ("shuffle = True", "a loader at "),
        ("model = torch.nn.Linear(4, 1); seed()", "a layer at "),
        ("torch.manual_seed(0); data = data[random.sample(range(16), 16)]", "`random.sample` at "),
        pytest.param(NUMPY.format("numpy.random.rand(16, 4)"), "`numpy.random.rand` at ", marks=requires("numpy")),
        pytest.param(
            "seed();" + NUMPY.format("numpy.random.default_rng().random((16, 4))"),
            "`numpy.random.default_rng` at ",
            marks=[requires("numpy"), pytest.mark.full("another case of a grid")],
        ),
        pytest.param(
            "seed();" + NUMPY.format("numpy.random.mtrand._rand.rand(16, 4)"),
            "a call that uses the generator of NumPy",
            marks=[requires("numpy"), pytest.mark.full("another case of a grid")],
        ),
    ],
)
def test_what_draws_without_a_seed_is_named(case: str, named: str | None, tmp_path: Path) -> None:
    """Data, order and weights make a layout incomparable, from any library; draws that change nothing do not."""
    script = tmp_path / "train.py"
    script.write_text(UNSEEDED.format(case=case))
    alone = recorded(tmp_path / "one", str(script))
    ranks = recorded(tmp_path / "ranks", str(script), requested_layout("dp2"))
    verdict = verdict_on(request_in(tmp_path), requested_layout("dp2"), alone, ended(tmp_path, 0), ranks)
    if named is None:
        assert str(verdict) == "dp2 equals one process"
        return
    line = script.read_text().splitlines().index(case) + 1 + 3 * (named == "a loader at ")
    place = f"{script}:{line}" if named.endswith(" at ") else ""
    assert str(verdict).startswith(f"dp2 is not comparable: {named}{place}"), verdict
    assert " without a seed, so each process gets other numbers. Call set_seed(0) before it" in str(verdict)
    assert (verdict.findings, verdict.largest) == ([], None)


@pytest.fixture(scope="module")
def one_by_parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RecordedRun]:
    """The training that fits every mesh, on one process that reads some parts of the data."""
    folder = tmp_path_factory.mktemp("parts")
    return functools.cache(lambda parts: recorded(folder / str(parts), f"{VERIFIED}:split", parts=parts))


@requires("engine:fsdp")
@pytest.mark.parametrize("name", ["tp2", "cp2", "hsdp2x2", pytest.param("fsdp2xtp2", marks=requires("torch:2.10"))])
def test_a_mesh_is_equal_to_one_process(one_by_parts: Callable[[int], RecordedRun], name: str, tmp_path: Path) -> None:
    """Whatever the ranks share, losses over tokens, gradients, the norm over the mesh and updates are the same."""
    layout = requested_layout(name)
    ranks = recorded(tmp_path / "ranks", f"{VERIFIED}:split", layout)
    assert compare(one_by_parts(layout.parts), ranks) == []
    assert (len(ranks.steps), len(set(ranks.parts)), len(ranks.parts)) == (2, layout.parts, layout.ranks)
    assert ranks.steps[0][0]["clipped"] > 0.1


@requires("deepspeed", "transformers")
def test_sequences_that_ranks_share_are_equal_to_one_process(tmp_path: Path) -> None:
    """A Llama whose sequences DeepSpeed cuts: losses over tokens are added over the ranks of a sequence too."""
    one = recorded(tmp_path / "one", f"{VERIFIED}:shared", parts=1)
    ranks = recorded(tmp_path / "ranks", f"{VERIFIED}:shared", requested_layout("zero3x1xsp2"))
    assert compare(one, ranks) == []
    assert (len(ranks.steps), ranks.parts, ranks.loss_parts, ranks.cut) == (2, [0, 0], [0, 1], True)
    assert ranks.loss(1) != ranks.steps[0][0]["losses"][0][0] / ranks.steps[0][0]["losses"][0][1], "a part of the text"
    worse = dataclasses.replace(ranks, loss_parts=[0, 0])
    assert str(compare(one, worse)[0]).startswith("step 1, loss: ")
    assert "rows that ranks read" not in str(compare(one, worse)[0])


def test_a_rate_that_is_scaled_by_the_number_of_processes(one: RecordedRun, tmp_path: Path) -> None:
    """One process has another rate unless it may say that it is as many: then all is equal."""
    ranks = recorded(tmp_path / "ranks", f"{VERIFIED}:scaled", requested_layout("dp2"))
    message = str(compare(one, ranks)[0])
    assert message.startswith("step 1, learning rate of group 0: 0.02 on rank 0 instead of 0.01; a script that scales")
    assert compare(recorded(tmp_path / "many", f"{VERIFIED}:scaled", counts=True), ranks) == []


@requires("engine:fsdp")
def test_what_a_strategy_refuses_is_written_down(tmp_path: Path) -> None:
    """A model that cannot be split is refused on every rank, with the strategy's own words."""
    with pytest.raises(pytest.fail.Exception, match="plan"):
        recorded(tmp_path / "ranks", f"{VERIFIED}:sound", requested_layout("tp2"))
    ranks = read_run(tmp_path / "ranks")
    assert (ranks.refused, ranks.steps) == (True, [])
    assert "plan" in str(ranks.note)


def test_the_command_is_green(accel) -> None:
    """The table has every step of one process and of the ranks, nothing is left behind, and the status is 0."""
    words = ("verify-parallel", "--cpu", "--steps", "2", "--layouts", "dp2", f"{VERIFIED}:sound")
    lines = accel(*words, quiet=30, status=0).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("one process", "dp2 "))] == ["one", "dp2", "dp2"]
    assert "dp2 equals one process" in lines
    assert lines[1].split() == ["layout", "step", "loss", "gradient", "norm", "weight", "norm", "memory", "per", "rank"]


def request_in(place: Path, timeout: float = 9.0) -> VerifyRequest:
    """Return what the tests verify."""
    return VerifyRequest("train.py", (), 2, (), False, timeout, place)


def ended(place: Path, *codes: int, timed_out: bool = False, printed: str = "") -> RanksEnded:
    """Return how ranks ended that printed something."""
    logs = tuple(place / f"{rank}.log" for rank in range(len(codes)))
    for log in logs:
        log.write_text(printed)
    return RanksEnded(codes, timed_out, logs)


def test_ranks_that_fail_are_a_verdict(one: RecordedRun, tmp_path: Path) -> None:
    """It names the rank that failed by itself and its error; the run on one process is not blamed."""
    with pytest.raises(pytest.fail.Exception, match="KeyError: 'ours'"):
        recorded(tmp_path / "ranks", f"{VERIFIED}:fails_on_ranks", requested_layout("dp2"))
    ranks = read_run(tmp_path / "ranks")
    (layout,) = requested_layouts("dp2")
    printed = "Traceback:\nKeyError: 'ours'\n"
    verdict = verdict_on(request_in(tmp_path), layout, one, ended(tmp_path, -9, 1, printed=printed), ranks)
    assert (verdict.state, verdict.message) == ("failed", "rank 1: KeyError: 'ours'")
    assert verdict.log == "Traceback:\nKeyError: 'ours'"
    slow = verdict_on(request_in(tmp_path), layout, one, ended(tmp_path, -9, -9, timed_out=True), ranks)
    assert slow.message == "it made 0 of 2 steps in 9 s"
    short = verdict_on(request_in(tmp_path), layout, one, ended(tmp_path, 0, 0), ranks)
    assert str(short) == "dp2 failed: it made 0 of 2 steps and ended"
    green = verdict_on(request_in(tmp_path), layout, one, ended(tmp_path, 0), one)
    assert (green.state, str(green)) == ("equal", "dp2 equals one process")


def test_a_script_that_cannot_be_verified_is_an_error(tmp_path: Path) -> None:
    """One that never steps, is too slow, or fails on one process, whose own traceback is shown."""
    idle = recorded(tmp_path / "idle", f"{VERIFIED}:never_steps")
    with pytest.raises(LaunchError, match="got 0 optimizer steps of 2 with a prepared optimizer"):
        check_one_process(request_in(tmp_path), ended(tmp_path, 0), idle)
    with pytest.raises(LaunchError, match=r"got 9 s for 2 optimizer steps\. Pass a longer --timeout"):
        check_one_process(request_in(tmp_path), ended(tmp_path, -9, timed_out=True), idle)
    with pytest.raises(LaunchError, match=r"(?s)got exit code 1 after:.*in fails.*KeyError: 'mine'"):
        verify_parallel(f"{VERIFIED}:fails", "dp2", cpu=True)
