"""Comparing a run on ranks with one process, step by step, causes before their effects.

Two sums of the same numbers in another order differ in rounding, so values agree within a tolerance that depends on the
number format in which the forward pass computes. Losses are compared by their difference, gradients by the norm of
the difference over the norm of the gradient, updates (weights less the weights before the first step) likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accel_core.options.enums import PRECISIONS
from accel_verify.parallel.records import RecordedRun


@dataclass(frozen=True)
class Tolerance:
    """How far values may differ.

    Attributes:
        format: The number format.
        loss: Relative difference of losses, and of norms that clipping returned.
        gradient: Norm of a parameter's gradient difference over the norm of its gradient.
        update: The same of a parameter's update.
        later: Gradients and updates from the second step on. Weights differ in rounding by then, and where that moves
            one value across the kink of a ReLU, the gradient of a sample changes by more than rounding.
        noise: Elements of gradients below this share of the largest one are rounding noise, of which optimizers such
            as Adam make updates of full size. They are left out of the comparison of updates, and gradients may differ
            by as much.
    """

    format: str
    loss: float
    gradient: float
    update: float
    later: float
    noise: float

    def at(self, step: int) -> Tolerance:
        """Return how far values of a step may differ."""
        if step == 1:
            return self
        # From the second step on weights differ in rounding, which a kink such as ReLU's can amplify.
        gradient, update = max(self.gradient, self.later), max(self.update, self.later)
        return replace(self, loss=10 * self.loss, gradient=gradient, update=update)


_TOLERANCES = {
    "float64": Tolerance("float64", 1e-9, 1e-7, 1e-6, 1e-5, 1e-11),
    "float32": Tolerance("float32", 1e-5, 1e-4, 1e-2, 3e-2, 1e-5),
    "float16": Tolerance("float16", 5e-3, 2e-2, 1e-1, 2e-1, 1e-2),
    "bfloat16": Tolerance("bfloat16", 2e-2, 1e-1, 3e-1, 3e-1, 5e-2),
    "fp8": Tolerance("fp8", 1e-1, 3e-1, 5e-1, 5e-1, 1e-1),
}
_MASKS = {"none": "no mask", "mask": "a mask of its own", "causal": "the causal mask"}


@dataclass(frozen=True)
class Finding:
    """A difference from one process.

    Attributes:
        step: Optimizer step, from 1.
        kind: What differs: `dropout`, `mask`, `loss`, `gradient`, `clipping`, `learning rate`, `update`, `metrics`.
        where: Parameter, module or call where it shows; empty if there is none.
        text: What is there and what one process has.
        difference: How far apart values are; `None` where something is wrong whatever the values are.
    """

    step: int
    kind: str
    where: str
    text: str
    difference: float | None = None

    @property
    def certain(self) -> bool:
        """Whether random numbers that ranks draw by themselves cannot be the cause."""
        return self.difference is None or self.kind == "learning rate"

    def __str__(self) -> str:
        """Return one line."""
        return f"step {self.step}, {self.kind}{f' of {self.where}' if self.where else ''}: {self.text}"


@dataclass(frozen=True)
class Largest:
    """The largest difference of an element of the weights after the last step."""

    value: float
    where: str


def tolerance_of(run: RecordedRun) -> Tolerance:
    """Return how far the values of a run may differ from those of another one in the same number format."""
    name = PRECISIONS[run.precision].compared_as
    if not name:
        kinds = {str(value.dtype).removeprefix("torch.") for value in run.tensors(0, "weights").values()}
        found = [each for each in _TOLERANCES.values() if each.format in kinds] or [_TOLERANCES["float32"]]
        return max(found, key=lambda each: each.loss)  # mixed weights are only as exact as the coarsest
    return _TOLERANCES[name]


def compare(one: RecordedRun, ranks: RecordedRun) -> list[Finding]:
    """Return what differs between one process and ranks, in the order in which it appears."""
    noise = _Noise(tolerance_of(one))
    found: list[Finding] = []
    for step in range(1, len(one.steps) + 1):
        tolerance = tolerance_of(one).at(step)
        found += _dropout(ranks, step)
        found += _masks(one, ranks, step)
        found += _strays(one, ranks, step, tolerance)
        found += _losses(one, ranks, step, tolerance)
        found += _gradients(one, ranks, step, tolerance)
        found += _clipping(one, ranks, step, tolerance)
        found += _rates(one, ranks, step)
        noise.add(one.tensors(step, "gradients"))
        found += _updates(one, ranks, step, tolerance, noise)
        found += _metrics(one, ranks, step, tolerance)
    return found


def largest_difference(one: RecordedRun, ranks: RecordedRun) -> Largest | None:
    """Return the largest difference of any element of the weights after the last step; `None` without weights."""
    step = min(len(one.steps), len(ranks.steps))
    if not step:
        return None
    ours, theirs = one.tensors(step, "weights"), ranks.tensors(step, "weights")
    pairs = [
        Largest(float((ours[name].double() - theirs[name].double()).abs().max()), name)
        for name in ours
        if name in theirs and ours[name].shape == theirs[name].shape and ours[name].numel()
    ]
    return max(pairs, key=lambda each: each.value, default=None)


def own_draw(one: RecordedRun, ranks: RecordedRun, last: int) -> str | None:
    """Find a rank that draws random numbers that one process does not draw.

    Ranks that draw for each sample, or for all of them and use their part, draw what one process draws too.
    """
    for ours, lines in zip(one.steps[:last], ranks.steps, strict=False):
        for rank, line in enumerate(lines):
            for place, drawn in line["drawn"].items():
                if not set(drawn) <= set(ours[0]["drawn"].get(place, ())):  # a rank may draw a part of it
                    return f"rank {rank} draws random numbers at {place} that one process does not draw"
    return None


def unseeded(one: RecordedRun, ranks: RecordedRun, last: int) -> list[str]:
    """Return the calls that drew without a seed, where runs differ in first weights, in rows, or in what they drew."""
    ours, theirs = one.tensors(0, "weights"), ranks.tensors(0, "weights")
    alike = all(name in theirs and torch.equal(value, theirs[name]) for name, value in ours.items())
    alike &= ranks.cut or all(_rows(one, step) == _rows(ranks, step) for step in range(1, last + 1))
    calls: list[str] = ranks.steps[last - 1][0]["unseeded"]
    return [] if alike and own_draw(one, ranks, last) is None else calls


class _Noise:
    """Which elements of each parameter had gradients above rounding noise, in every step so far."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._counts: dict[str, Tensor] = {}

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Note the gradients of a step."""
        floor = floor_of(gradients, self._tolerance)
        for name, value in gradients.items():
            counts = value.abs() > floor
            # Noise in one step is enough: Adam's moments keep it.
            self._counts[name] = self._counts[name] & counts if name in self._counts else counts

    def without(self, name: str, value: Tensor) -> Tensor:
        """Return the elements of a parameter's update that count; all of one that had no gradient."""
        counts = self._counts.get(name)
        return value if counts is None else value[counts]


def floor_of(gradients: dict[str, Tensor], tolerance: Tolerance) -> float:
    """Return the size below which an element of a gradient is rounding noise."""
    sizes = [float(value.abs().max()) for value in gradients.values() if value.numel()]
    return tolerance.noise * max(sizes, default=0.0)


def _dropout(ranks: RecordedRun, step: int) -> Iterator[Finding]:
    """Find ranks that drop the same elements of different data, or different elements of the same data."""
    lines = ranks.steps[step - 1]
    seen: dict[str, int] = {}
    for rank in ranks.losers:  # one rank for each part of the data
        seed = lines[rank]["seed"]
        if seed in seen:
            text = f"ranks {seen[seed]} and {rank} draw the same masks for different data; seed with "
            yield Finding(step, "dropout", "", f"{text}set_seed(seed, device_specific=True)")
            return
        if seed is not None:
            seen[seed] = rank
    for rank, part in enumerate(ranks.loss_parts):
        first = ranks.losers[sorted(set(ranks.loss_parts)).index(part)]
        if lines[rank]["seed"] != lines[first]["seed"]:
            text = f"ranks {first} and {rank} of one replica draw different masks; seed with "
            yield Finding(step, "dropout", "", f"{text}set_seed(seed, device_specific=True)")
            return


def _masks(one: RecordedRun, ranks: RecordedRun, step: int) -> Iterator[Finding]:
    expected = one.steps[step - 1][0]["masks"]
    for rank, line in enumerate(ranks.steps[step - 1]):
        for number, (ours, theirs) in enumerate(zip(expected, line["masks"], strict=False), 1):
            if ours != theirs:
                text = f"it has {_MASKS[theirs]} on rank {rank}, and on one process {_MASKS[ours]}"
                yield Finding(step, "mask", f"attention call {number}", text)
                return


def _losses(one: RecordedRun, ranks: RecordedRun, step: int, tolerance: Tolerance) -> Iterator[Finding]:
    expected, found = one.loss(step), ranks.loss(step)
    if _apart(expected, found, tolerance.loss):
        place = _first_module(one, ranks, tolerance) if step == 1 else None
        text = f"{found:.7g} instead of {expected:.7g}"
        if place is not None:
            text += f"; outputs differ first in `{place[0] or 'the model'}` ({place[1]})"
        if not ranks.cut and _rows(one, step) != _rows(ranks, step):
            text += "; the rows that ranks read are not those that one process read"
        yield Finding(step, "loss", "", text, abs(found - expected))


def _apart(one: float, other: float, relative: float) -> bool:
    # Written so that NaN and infinity count as different; within a share of infinity lies every number.
    return not abs(one - other) <= relative * max(abs(one), abs(other), 1e-12) < math.inf


def _rows(run: RecordedRun, step: int) -> list[str]:
    """Return the rows that were read for a step, part after part, batch after batch."""
    batches = [run.steps[step - 1][rank]["rows"] for rank in run.readers]
    # As one process reads.
    return [row for together in zip(*batches, strict=False) for rows in together for row in rows]


_Output = tuple[str, str, int, float, float]


def _first_module(one: RecordedRun, ranks: RecordedRun, tolerance: Tolerance) -> tuple[str, str] | None:
    """Return the name and class of the first module whose outputs in the first batch differ, over all ranks."""
    expected: list[_Output] = one.steps[0][0]["outputs"]
    lines: list[list[_Output]] = [line["outputs"] for line in ranks.steps[0]]
    for number, (name, kind, count, total, squares) in enumerate(expected):
        # Other modules ran: nothing to compare.
        if any(len(outputs) <= number or outputs[number][0] != name for outputs in lines):
            return None
        groups = (ranks.losers, range(len(lines)))  # tensor parallel leaves outputs whole, or splits them over ranks
        group = next((each for each in groups if sum(lines[rank][number][2] for rank in each) == count), None)
        if group is None:
            continue
        size = (squares * max(count, 1)) ** 0.5  # bounds the sum of absolute values
        near = tolerance.loss * max(size, 1e-12)
        if abs(sum(lines[rank][number][3] for rank in group) - total) > near or _apart(
            sum(lines[rank][number][4] for rank in group), squares, 2 * tolerance.loss
        ):
            return name, kind
    return None


def _gradients(one: RecordedRun, ranks: RecordedRun, step: int, tolerance: Tolerance) -> Iterator[Finding]:
    ours, theirs = one.tensors(step, "gradients"), ranks.tensors(step, "gradients")
    floor = floor_of(ours, tolerance)
    lines = ranks.steps[step - 1]
    for name, value in ours.items():
        apart = _rank_apart(lines, "gradients", name, tolerance.gradient, floor * value.numel() ** 0.5)
        if apart is not None:
            text = f"ranks 0 and {apart} disagree after the backward pass; a reduction over ranks is missing"
            yield Finding(step, "gradient", f"`{name}`", text)
            continue
        if name not in theirs:
            yield Finding(step, "gradient", f"`{name}`", "there is none, and one process has one")
            continue
        found = _distance(value, theirs[name])
        if found is None:
            text = f"its shape is {tuple(theirs[name].shape)} instead of {tuple(value.shape)}"
            yield Finding(step, "gradient", f"`{name}`", text)
        # Written so that NaN and infinity differ.
        elif not found[0] <= tolerance.gradient * found[1] + floor * value.numel() ** 0.5 < math.inf:
            yield Finding(step, "gradient", f"`{name}`", _by_how_much(value, theirs[name]), found[0] / (found[1] or 1))
    for name in theirs.keys() - ours.keys():
        if theirs[name].any():  # FSDP2 holds zeros for what no rank used, until the step; what they move are weights
            yield Finding(step, "gradient", f"`{name}`", "there is one, and one process has none")


def _strays(one: RecordedRun, ranks: RecordedRun, step: int, tolerance: Tolerance) -> Iterator[Finding]:
    """Find optimizers that were not prepared and step with gradients that ranks do not share."""
    lines = ranks.steps[step - 1]
    for name in one.steps[step - 1][0]["strays"]:
        apart = _rank_apart(lines, "strays", name, tolerance.gradient, 0.0)
        if apart is not None:
            text = f"ranks 0 and {apart} step with different ones; nobody reduces those of what was not prepared"
            yield Finding(step, "gradient", name, text)
            return


def _rank_apart(lines: list[dict[str, Any]], what: str, name: str, relative: float, floor: float) -> int | None:
    """Return the first rank whose whole tensor is not that of rank 0."""
    norm, digest = lines[0][what].get(name, (0.0, ""))
    for rank, line in enumerate(lines[1:], 1):
        other, others = line[what].get(name, (norm, digest))
        if others != digest and not abs(other - norm) <= relative * norm + floor < math.inf:  # equal bits are near
            return rank
    return None


def _distance(one: Tensor, other: Tensor) -> tuple[float, float] | None:
    """Return the norm of a difference and that of the first tensor; `None` of different shapes."""
    if one.shape != other.shape:
        return None
    return float(torch.linalg.vector_norm(one.double() - other.double())), float(torch.linalg.vector_norm(one.double()))


def _by_how_much(one: Tensor, other: Tensor) -> str:
    apart = (one.double() - other.double()).abs()
    place = torch.unravel_index(apart.argmax(), apart.shape)
    norms = [float(torch.linalg.vector_norm(value.double())) for value in (other, one)]
    index = [int(each) for each in place]
    return f"norm {norms[0]:.6g} instead of {norms[1]:.6g}; largest difference {float(apart.max()):.2g} at {index}"


def _clipping(one: RecordedRun, ranks: RecordedRun, step: int, tolerance: Tolerance) -> Iterator[Finding]:
    expected = one.steps[step - 1][0]["clipped"]
    for rank, line in enumerate(ranks.steps[step - 1]):
        found = line["clipped"]
        if (expected is None) != (found is None):
            text = f"rank {rank} {'does not clip' if found is None else 'clips'}, and one process does otherwise"
            yield Finding(step, "clipping", "", text)
            return
        if expected is not None and _apart(expected, found, max(tolerance.loss, tolerance.gradient)):
            text = f"clip_grad_norm_ returned {found:.7g} on rank {rank} instead of {expected:.7g}"
            yield Finding(step, "clipping", "", text, abs(found - expected))
            return


def _rates(one: RecordedRun, ranks: RecordedRun, step: int) -> Iterator[Finding]:
    expected = one.steps[step - 1][0]["rates"]
    for rank, line in enumerate(ranks.steps[step - 1]):
        for group, (ours, theirs) in enumerate(zip(expected, line["rates"], strict=False)):
            if _apart(ours, theirs, 1e-9):
                text = f"{theirs:.7g} on rank {rank} instead of {ours:.7g}"
                if not _apart(theirs, ours * len(ranks.parts), 1e-9):  # exactly as many times as there are parts
                    text += "; a script that scales it by num_processes is verified with --count-as-ranks"
                yield Finding(step, "learning rate", f"group {group}", text, abs(ours - theirs))
                return


def _updates(one: RecordedRun, ranks: RecordedRun, step: int, tolerance: Tolerance, noise: _Noise) -> Iterator[Finding]:
    before, ours = one.tensors(0, "weights"), one.tensors(step, "weights")
    began, theirs = ranks.tensors(0, "weights"), ranks.tensors(step, "weights")
    lines = ranks.steps[step - 1]
    for name, value in ours.items():
        if name not in theirs or theirs[name].shape != value.shape:
            yield Finding(step, "update", f"`{name}`", "ranks have no such parameter of this shape")
            continue
        apart = _rank_apart(lines, "weights", name, tolerance.gradient, 0.0)
        if apart is not None:
            yield Finding(step, "update", f"`{name}`", f"ranks 0 and {apart} disagree on the weights")
            continue
        moved, should = theirs[name].double() - began[name].double(), value.double() - before[name].double()
        if moved.numel() and not moved.any() and should.abs().max() > 0:
            text = "it did not move, and on one process it did; the optimizer holds another, stale parameter"
            yield Finding(step, "update", f"`{name}`", text)
            continue
        found = _distance(noise.without(name, should), noise.without(name, moved))
        # A small update of a large weight is itself rounded when it is added.
        rounding = torch.finfo(value.dtype).eps * float(torch.linalg.vector_norm(value.double()))
        if found is not None and not found[0] <= tolerance.update * found[1] + step * rounding < math.inf:
            text = _by_how_much(should, moved)
            yield Finding(step, "update", f"`{name}`", text, found[0] / (found[1] or 1.0))


def _metrics(one: RecordedRun, ranks: RecordedRun, step: int, tolerance: Tolerance) -> Iterator[Finding]:
    """Compare what was gathered between this step and the next one."""
    of_one, of_ranks = ([each for each in run.metrics if _belongs(each, step, run)] for run in (one, ranks))
    for number, (ours, theirs) in enumerate(zip(of_one, of_ranks, strict=False), 1):
        where = f"{theirs['function']}, call {number}"
        for expected, found in zip(ours["values"], theirs["values"], strict=False):
            # Of equal values, the number of rows says nothing.
            if (expected[2] and found[2]) or expected[0] == found[0]:
                means = [total / max(1, rows) for rows, total, _ in (expected, found)]
                same = means[0] == means[1] or all(map(math.isnan, means))  # a metric may hold -inf or NaN as a filler
                if not same and _apart(means[0], means[1], max(100 * tolerance.loss, 1e-3)):
                    text = f"mean {means[1]:.6g} instead of {means[0]:.6g}"
                    yield Finding(step, "metrics", where, text, abs(means[0] - means[1]))
                    return
            elif found[0] > expected[0]:
                text = f"samples are counted twice; {found[0]} rows instead of {expected[0]}: use gather_for_metrics"
                yield Finding(step, "metrics", where, text)
                return
            else:
                yield Finding(step, "metrics", where, f"{found[0]} rows instead of {expected[0]}")
                return
    if len(of_one) != len(of_ranks) and one.note is None and ranks.note is None:
        text = f"ranks gathered {len(of_ranks)} times and one process {len(of_one)} times"
        yield Finding(step, "metrics", "", text)


def _belongs(metric: dict[str, Any], step: int, run: RecordedRun) -> bool:
    """Return whether a metric was gathered after a step; what came before the first belongs to it."""
    return bool(max(1, metric["step"]) == step) and len(run.steps) >= step
