"""What counts as a difference between one process and ranks, and what it is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_verify.parallel.comparison import compare, largest_difference, own_draw, tolerance_of, unseeded
from accel_verify.parallel.records import RecordedRun
from accel_verify.parallel.values import sketch

BEFORE = {"weight": torch.ones(4), "bias": torch.zeros(2)}
GRADIENTS = {"weight": torch.tensor([1.0, 2.0, 3.0, 4.0]), "bias": torch.tensor([0.0, 1e-6])}
MakeRun = Callable[..., RecordedRun]


@pytest.fixture
def make(tmp_path: Path) -> MakeRun:
    """Return what makes a run of one step on any number of ranks."""

    def run(name: str, ranks: int = 1, *, gradients: dict[str, Tensor] | None = None, **changed: Any) -> RecordedRun:
        folder = tmp_path / name
        folder.mkdir()
        gradients = gradients or GRADIENTS
        weights = {key: BEFORE[key] - 0.1 * gradients[key].sign() for key in BEFORE} | changed.pop("weights", {})
        for file, values in (
            ("0-weights", changed.pop("before", BEFORE)),
            ("1-gradients", gradients),
            ("1-weights", weights),
        ):
            torch.save(values, folder / f"{file}.pt")
        line = {
            "losses": [[2.0, None]], "rows": [["a", "b"]], "clipped": 5.5, "rates": [0.1], "outputs": [], "masks": [],
            "drawn": {"noise.py:3": ["first", "second"]}, "unseeded": ["`torch.rand` at train.py:9"],
            "gradients": {key: sketch(value) for key, value in gradients.items()},
            "strays": {},
            "weights": {key: sketch(value) for key, value in weights.items()},
        }  # fmt: skip
        lines = [line | {"seed": f"seed {rank}"} | changed for rank in range(ranks)]
        return RecordedRun(folder, list(range(ranks)), list(range(ranks)), "no", [lines], memory=[1] * ranks)

    return run


def test_equal_runs_have_no_findings(make: MakeRun) -> None:
    """On ranks whose dropout differs as it should."""
    one, ranks = make("one"), make("ranks", 2)
    assert compare(one, ranks) == []
    assert largest_difference(one, ranks).value == 0.0
    assert (one.loss(1), one.norm(1, "gradients")) == (2.0, pytest.approx(30**0.5))


def test_what_is_gradient_noise_may_move_otherwise(make: MakeRun) -> None:
    """Adam makes full updates of rounding; of a gradient that counts, the same difference is one."""
    one = make("one")
    noisy = make("noisy", 2, gradients=GRADIENTS | {"bias": torch.tensor([0.0, -1e-6])})
    assert compare(one, noisy) == []
    turned = make("turned", 2, gradients=GRADIENTS | {"weight": torch.tensor([1.0, 2.0, 3.0, -4.0])})
    kinds = [(found.kind, found.where) for found in compare(one, turned)]
    assert kinds == [("gradient", "`weight`"), ("update", "`weight`")]


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"losses": [[2.1, None]]}, "loss", "2.1 instead of 2"),
        ({"losses": [[float("nan"), None]]}, "loss", "nan instead of 2"),
        ({"losses": [[float("inf"), None]]}, "loss", "inf instead of 2"),
        ({"losses": [[2.1, None]], "rows": [["b", "a"]]}, "loss", "the rows that ranks read are not those"),
        ({"clipped": None}, "clipping", "rank 0 does not clip"),
        ({"clipped": 4.0}, "clipping", "returned 4 on rank 0 instead of 5.5"),
        ({"clipped": float("inf")}, "clipping", "returned inf on rank 0 instead of 5.5"),
        ({"rates": [0.2]}, "learning rate", "0.2 on rank 0 instead of 0.1"),
        ({"seed": "one for all"}, "dropout", "ranks 0 and 1 draw the same masks for different data"),
        ({"weights": {"weight": torch.ones(4)}}, "update", "it did not move"),
        ({"weights": {"weight": torch.full((4,), 0.5)}}, "update", "norm 1 instead of 0.2"),
    ],
)
def test_each_kind_of_difference_is_named(make: MakeRun, changed: dict[str, Any], kind: str, text: str) -> None:
    """The finding has the step, the kind, and both values."""
    one = make("one", rows=[["a", "b", "a", "b"]])
    first = compare(one, make("ranks", 2, **changed))[0]
    assert (first.step, first.kind) == (1, kind)
    assert text in str(first)


@pytest.mark.parametrize(
    ("changed", "draws", "named"),
    [
        ({}, False, False),
        ({"drawn": {"noise.py:3": ["first"]}}, False, False),
        ({"drawn": {"noise.py:3": ["third"]}}, True, True),
        ({"rows": [["b", "a"]]}, False, True),
        ({"before": {"weight": torch.zeros(4), "bias": torch.zeros(2)}}, False, True),
    ],
)
def test_random_numbers_are_named_where_they_differ(
    make: MakeRun, changed: dict[str, Any], draws: bool, named: bool
) -> None:
    """A draw without a seed is a cause if weights, rows or draws differ; one that ranks make alone is one by itself."""
    one, ranks = make("one", rows=[["a", "b", "a", "b"]]), make("ranks", 2, **changed)
    own = "rank 0 draws random numbers at noise.py:3 that one process does not draw"
    assert own_draw(one, ranks, 1) == (own if draws else None)
    assert unseeded(one, ranks, 1) == (["`torch.rand` at train.py:9"] if named else [])


def test_an_overflow_on_one_side_is_a_difference(make: MakeRun) -> None:
    """One process whose gradients overflow skips its step; every number lies within a share of infinity."""
    overflow = {"weight": torch.tensor([1.0, float("inf"), 3.0, 4.0])}
    one = make("one", gradients=GRADIENTS | overflow, weights=BEFORE)
    assert ("gradient", "`weight`") in [(found.kind, found.where) for found in compare(one, make("ranks", 2))]


@pytest.mark.parametrize("what", ["gradients", "weights"])
@pytest.mark.parametrize(("rank", "norm"), [(1, float("nan")), (0, float("inf"))])
def test_a_rank_that_overflows_alone_is_named(make: MakeRun, what: str, rank: int, norm: float) -> None:
    """Nobody reduced what is infinite or NaN on one rank, whatever the other ranks have."""
    ranks = make("ranks", 2)
    ranks.steps[0][rank] = {**ranks.steps[0][rank], what: {**ranks.steps[0][rank][what], "weight": (norm, "other")}}
    assert "ranks 0 and 1 disagree" in str(compare(make("one"), ranks)[0])


@pytest.mark.parametrize(
    ("changed", "certain"),
    [
        ({"losses": [[2.1, None]]}, False),
        ({"clipped": 4.0}, False),
        ({"weights": {"weight": torch.full((4,), 0.5)}}, False),
        ({"weights": {"weight": torch.ones(4)}}, True),
        ({"seed": "one for all"}, True),
        ({"rates": [0.2]}, True),
        ({"masks": ["none"]}, True),
    ],
)
def test_random_numbers_do_not_excuse_a_fault(make: MakeRun, changed: dict[str, Any], certain: bool) -> None:
    """Values may differ because of them; a stale parameter, a lost mask, a rate or equal seeds may not."""
    one = make("one", masks=["mask"] if "masks" in changed else [])
    assert compare(one, make("ranks", 2, **changed))[0].certain is certain


def test_ranks_of_a_replica_draw_the_same(make: MakeRun) -> None:
    """Those that split a model's products read one part, and drop the same elements."""
    ranks = make("ranks", 2)
    ranks.parts, ranks.loss_parts = [0, 0], [0, 0]
    assert str(compare(make("one"), ranks)[0]) == (
        "step 1, dropout: ranks 0 and 1 of one replica draw different masks; seed with set_seed(seed, "
        "device_specific=True)"
    )


def test_weighted_losses_are_sums_over_sums(make: MakeRun) -> None:
    """A rank with three times as many tokens counts three times as much."""
    ranks = make("ranks", 2)
    ranks.steps[0][0]["losses"], ranks.steps[0][1]["losses"] = [[8.0, 4]], [[0.0, 12]]
    assert ranks.loss(1) == 0.5


@pytest.mark.parametrize(
    ("of_one", "of_ranks", "text"),
    [
        ([[3, 1.0, False]], [[4, 2.0, False]], "samples are counted twice; 4 rows instead of 3"),
        ([[3, 1.0, False]], [[2, 1.0, False]], "2 rows instead of 3"),
        ([[3, 1.0, False]], [[3, 2.0, False]], "mean 0.666667 instead of 0.333333"),
        ([[1, 2.0, True]], [[2, 4.0, True]], ""),
        ([[3, 1.0, False]], [[3, float("nan"), False]], "mean nan instead of 0.333333"),
        ([[3, 1.0, False]], [[3, float("inf"), False]], "mean inf instead of 0.333333"),
        ([[3, float("-inf"), False]], [[3, float("-inf"), False]], ""),
        ([[3, float("nan"), False]], [[3, float("nan"), False]], ""),
    ],
)
def test_metrics_are_rows_and_means(make: MakeRun, of_one: list[Any], of_ranks: list[Any], text: str) -> None:
    """Rows are counted exactly; of one value of each rank, such as a loss, the mean is compared."""
    one, ranks = make("one"), make("ranks", 2)
    for run, values in ((one, of_one), (ranks, of_ranks)):
        run.metrics = [{"function": "gather", "step": 1, "values": values}]
    assert [found.text.partition(":")[0] for found in compare(one, ranks)] == ([text] if text else [])
    ranks.metrics = []
    assert "ranks gathered 0 times and one process 1 times" in str(compare(one, ranks)[0])


def test_the_first_module_that_differs_is_named(make: MakeRun) -> None:
    """Outputs are summed over the ranks, or over one of each group that holds them whole."""
    outputs = [["in", "Linear", 8, 4.0, 6.0], ["mid.drop", "Odd", 8, 1.0, 2.0], ["", "Net", 8, 0.5, 1.0]]
    one = make("one", outputs=outputs)
    halves = [[name, kind, 4, total / 2, squares / 2] for name, kind, _, total, squares in outputs]
    other = [halves[0], ["mid.drop", "Odd", 4, 3.0, 2.0], halves[2]]
    ranks = make("ranks", 2, outputs=other, losses=[[3.0, None]])
    assert compare(one, ranks)[0].text.startswith("3 instead of 2; outputs differ first in `mid.drop` (Odd)")


def test_the_tolerance_is_that_of_the_number_format(make: MakeRun) -> None:
    """The forward pass decides, else the widest format of the weights; later steps may lie further apart."""
    one = make("one")
    assert tolerance_of(one).format == "float32"
    one.precision = "bf16"
    assert tolerance_of(one).format == "bfloat16"
    near, later = tolerance_of(one).at(1), tolerance_of(one).at(2)
    assert (near.loss, near.gradient) < (later.loss, later.gradient)
