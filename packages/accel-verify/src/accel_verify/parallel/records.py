"""What the recorders of a run wrote, read back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class RecordedRun:
    """One run of the script: what each rank wrote down."""

    folder: Path  # where whole gradients and weights lie
    parts: list[int]  # for each rank, the part of the data that it reads
    loss_parts: list[int]  # for each rank, the part of the loss that it computes
    precision: str  # the number format of the forward pass, `no` for that of the weights
    steps: list[list[dict[str, Any]]]  # for each step, the lines of all ranks
    metrics: list[dict[str, Any]] = field(default_factory=list)  # what rank 0 gathered, call by call
    memory: list[int] = field(default_factory=list)  # the most memory that each rank held, in bytes
    # What the script raised after its last step, or the strategy's refusal before; `None` of neither.
    note: str | None = None
    refused: bool = False  # whether a strategy refused the script
    cut: bool = False  # whether each rank reads parts of rows, as ranks that share sequences by DeepSpeed do

    def tensors(self, step: int, what: str) -> dict[str, Tensor]:
        """Return the whole gradients or weights of a step, by name; weights of step 0 are those before the first."""
        found: dict[str, Tensor] = torch.load(self.folder / f"{step}-{what}.pt", mmap=True, weights_only=True)
        return found

    @property
    def readers(self) -> list[int]:
        """For each part of the data, the first rank that reads it."""
        return _first_of_each(self.parts)

    @property
    def losers(self) -> list[int]:
        """For each part of the loss, the first rank that computes it."""
        return _first_of_each(self.loss_parts)

    def loss(self, step: int) -> float:
        """Return the loss of a step over all ranks: the mean of means, or the sum of sums over that of weights."""
        lines = self.steps[step - 1]
        pairs: list[tuple[float, float | None]] = [pair for rank in self.losers for pair in lines[rank]["losses"]]
        if any(weight is not None for _, weight in pairs):
            # With weights, ranks pass sums: the loss is over all tokens.
            return sum(value for value, _ in pairs) / (sum(weight or 0.0 for _, weight in pairs) or 1.0)
        return sum(value for value, _ in pairs) / max(1, len(pairs))

    def norm(self, step: int, what: str) -> float:
        """Return the norm of all gradients or weights of a step, as rank 0 sees them."""
        norms: list[float] = [norm for norm, _ in self.steps[step - 1][0][what].values()]
        return math.sqrt(sum(norm * norm for norm in norms))


def _first_of_each(parts: list[int]) -> list[int]:
    return [parts.index(part) for part in sorted(set(parts))]


def read_run(folder: Path) -> RecordedRun:
    """Read what the recorders of a run wrote; steps that not every rank made are left out."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    first = {line["kind"]: line for lines in ranks for line in lines if line["kind"] == "run"}
    about = first.get("run", {"parts": [0], "loss_parts": [0], "precision": "no"})
    steps = [[line for line in lines if line["kind"] == "step"] for lines in ranks]
    ends = [line for lines in ranks for line in lines if line["kind"] == "end"]
    last = next((line for line in ends if line["refused"]), next((line for line in ends if line["note"]), None))
    return RecordedRun(
        folder,
        about["parts"],
        about["loss_parts"],
        about["precision"],
        [list(lines) for lines in zip(*steps, strict=False)],  # only steps that every rank made
        [line for line in ranks[0] if line["kind"] == "metric"] if ranks else [],
        [line["memory"] for line in ends],
        None if last is None else last["note"],
        last is not None and bool(last["refused"]),
        about.get("cut", False),
    )
