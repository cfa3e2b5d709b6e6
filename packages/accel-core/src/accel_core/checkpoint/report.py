"""What a restore found: per component and rank, missing, unexpected, damaged, unsafe or not fitting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Literal

from accel_core._passed import Passed
from accel_core._records import record
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)

Kind = Literal["unsafe", "damaged", "missing", "unexpected", "mismatch", "extra"]

_SHOWN = 40
_NAMES_SHOWN = 8


@record(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        component: Such as `model 0` or `optimizer 1`.
        kind: What is the matter. `extra` is a whole component that the run does not have; it is not an error.
        detail: What exactly, with names.
        rank: The rank that found it.
    """

    component: str
    kind: Kind
    detail: str
    rank: int = 0


@record
class Restoration:
    """One component that is about to be restored."""

    component: str  # such as `model 0`
    # restores it, or what fits of it. Raises nothing that `findings` could have told
    apply: Callable[[], None] = lambda: None
    findings: list[Finding] = field(default_factory=list)
    partial: bool = False  # whether `apply` does something useful in spite of the findings
    files: frozenset[str] = frozenset()
    # what of the component lies in each file, for errors; empty where a file is the component
    holds: dict[str, list[str]] = field(default_factory=dict)


def _found(*kinds: Kind) -> Callable[[RestoreReport], list[Finding]]:
    """Return what takes the findings of some kinds out of a report."""
    return lambda report: [found for found in report.findings if found.kind in kinds]


@record
class RestoreReport:
    """What was restored from a checkpoint and what was not.

    Attributes:
        folder: The checkpoint.
        world_size: Number of ranks that wrote it.
        restored: Components restored whole.
        partial: Components of which a part was restored (`strict=False`).
        findings: Everything that was not as it should be, on all ranks.
        absent: Number of ranks of the run that were not there when rank 0 saved alone.
        part: "model" or "adapters" where nothing else was saved (`parts=`).
        reseeded: Ranks whose random states the checkpoint lacks, so that they are derived from those of another rank.

    Examples:
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> folder = accelerator.save_state("reported")
        >>> report = accelerator.load_state("reported")
        >>> report.world_size, report.missing, report.mismatched
        (1, [], [])
    """

    folder: Path
    world_size: int
    restored: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    absent: int = 0
    reseeded: list[int] = field(default_factory=list)
    part: str | None = None

    missing = Passed[list[Finding]](_found("missing"), "What the run has and the checkpoint has not.")
    unexpected = Passed[list[Finding]](_found("unexpected", "extra"), "What the checkpoint has and the run has not.")
    damaged = Passed[list[Finding]](_found("damaged", "unsafe"), "What is truncated, altered or unsafe.")
    mismatched = Passed[list[Finding]](_found("mismatch"), "What has another shape, dtype or grouping.")

    def __str__(self) -> str:
        """One line for each finding; the same finding of several ranks is one line."""
        ranks: dict[tuple[str, str, str], list[int]] = {}
        for found in self.findings:
            ranks.setdefault((found.component, found.kind, found.detail), []).append(found.rank)
        lines = [
            f"{component}: {kind}: {detail} (rank {', '.join(map(str, sorted(set(where))))})"
            for (component, kind, detail), where in ranks.items()
        ]
        left = len(lines) - _SHOWN
        return "\n".join([*lines[:_SHOWN], f"and {left} more"] if left > 0 else lines)

    def error(self) -> CheckpointError | None:
        """Return the error for the worst finding, or `None` where nothing forbids a strict restore."""
        kinds = {found.kind for found in self.findings if found.kind != "extra"}
        if not kinds:
            return None
        whole = CheckpointDamagedError if "damaged" in kinds else CheckpointMismatchError
        error = UnsafeCheckpointError if "unsafe" in kinds else whole
        return error(
            f"The checkpoint {str(self.folder)!r} cannot be restored, and nothing was changed; got:\n{self}\n"
            "Load another checkpoint, or pass strict=False to restore what fits."
        )


def finding_of(error: Exception, component: str, rank: int) -> Finding:
    """Convert an error in reading a component into a finding."""
    kind: Kind = "damaged"
    if isinstance(error, UnsafeCheckpointError):
        kind = "unsafe"
    elif isinstance(error, FileNotFoundError):
        kind = "missing"
    elif isinstance(error, CheckpointMismatchError):
        kind = "mismatch"
    detail = str(error)
    if isinstance(error, FileNotFoundError) and not isinstance(error, CheckpointNotFoundError):
        detail = f"{Path(str(error.filename)).name} is not there"
    elif isinstance(error, OSError):
        detail = f"{error.filename}: {error.strerror}"
    return Finding(component, kind, detail, rank)


def listed(names: list[str]) -> str:
    """Return some names as text; of many, only the first and how many more there are.

    >>> listed(["body.weight", "body.bias"])
    'body.weight, body.bias'
    """
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
