"""Finding a checkpoint, and comparing it with the run before anything of the run is changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_core._records import record
from accel_core.checkpoint import commit, names, progress, stateful
from accel_core.checkpoint.agreement import agree_on_latest, agree_on_save, together
from accel_core.checkpoint.format import CheckpointFormat, Run, Source
from accel_core.checkpoint.formats import recognise
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.opened import Opened
from accel_core.checkpoint.places import loaded_from
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.report import Finding, Restoration, RestoreReport, listed
from accel_core.errors import CheckpointError, ConfigurationError, UnsafeCheckpointError
from accel_core.process.world import World

__all__ = ["Chosen", "Reading", "examine", "model_plans", "read_and_compare", "share"]

_CHECKERS = 2
_ATTEMPTS = 10
_PAUSE = 0.001


@record(frozen=True)
class Chosen:
    """The checkpoint that all ranks load.

    Attributes:
        target: Where it was saved to.
        source: Where it is read from.
        format: How models and optimizers lie in it.
        whole: Whether all of its files are there with their sizes.
    """

    target: Path
    source: Source
    format: CheckpointFormat
    whole: bool

    def read_by(self, rank: int, world: World) -> set[str]:
        """Return the names that a rank reads, without the random states of other ranks."""
        ranks = self.source.world_size
        own = names.random_states_name(rank if rank < ranks else rank % ranks)
        read = self.format.files_of(self.source, rank, world.size)
        return {name for name in read if name == own or not name.startswith(names.RNG_STATE_NAME)}


@record
class Reading:
    """A checkpoint that was compared with the run.

    Attributes:
        chosen: Which.
        opened: What its files were when reading began.
        report: What was found.
        plans: How what was compared is restored.
    """

    chosen: Chosen
    opened: Opened
    report: RestoreReport
    plans: list[Restoration]

    @property
    def source(self) -> Source:
        """Where it is read from."""
        return self.chosen.source


def read_and_compare(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any],
    model_kwargs: dict[str, Any],
    ranks: Ranks,
    *,
    strict: bool,
) -> Reading:
    """Compare a checkpoint with the run, from the beginning again whenever another process replaced it meanwhile."""
    for attempt in range(_ATTEMPTS):
        series = _series(run, input_dir)
        try:
            chosen = _choose(run, input_dir, load_kwargs, model_kwargs, ranks)
        except CheckpointError:  # the same on every rank
            if not any(ranks.exchange(_series(run, input_dir) != series)):
                raise
            time.sleep(_PAUSE * 2**attempt)
            continue
        read = sorted(chosen.read_by(run.world.rank, run.world))
        opened = Opened.look(chosen.target, chosen.source.folder, read)
        failure: CheckpointError | None = None
        reading = None
        try:
            reading = _compare(run, chosen, opened, ranks, strict=strict)
        except CheckpointError as error:  # the same on every rank, so every rank comes to the question below
            failure = error
        if not any(ranks.exchange(opened.replaced())):
            if failure is not None:
                raise failure
            if reading is not None:
                return reading
        time.sleep(_PAUSE * 2**attempt)
    raise CheckpointError(
        f"The checkpoint {str(input_dir)!r} could not be read; got another save in its place {_ATTEMPTS} times "
        "meanwhile. Load a copy of it, or save less often."
    )


def _series(run: Run, input_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Return the numbered checkpoints among which the latest is looked for, which another process may delete."""
    automatic = input_dir is None and run.project.automatic_checkpoint_naming
    return commit.numbered(loaded_from(run, None)) if automatic else []


def _compare(run: Run, chosen: Chosen, opened: Opened, ranks: Ranks, *, strict: bool) -> Reading:
    """Compare everything that can be compared before load hooks are called."""
    source = chosen.source
    _agree_on_positions(run, ranks)
    report = RestoreReport(source.folder, source.world_size)
    report.absent = source.manifest.absent if source.manifest else 0
    report.reseeded = list(range(source.world_size, run.world.size))
    reading = Reading(chosen, opened, report, [])

    def everything_else() -> list[Restoration]:
        # The scaler before the optimizers: one that steps while it is loaded does so at the scale of the checkpoint.
        found = stateful.scaler_restorations(run, source) + chosen.format.optimizer_restorations(run, source)
        found += stateful.restorations(run, source)
        return [*found, progress.restoration(run, source), progress.random_restoration(run, source)]

    with ThreadPoolExecutor(max_workers=_CHECKERS, thread_name_prefix="accel-checkpoint") as pool:
        checks = _begin_checks(chosen, run.world, pool)
        reading.plans = examine(everything_else, ranks)
        if not run.load_state_pre_hooks:
            reading.plans = examine(lambda: model_plans(run, list(run.models), reading), ranks) + reading.plans
        held = {file: values for plan in reading.plans for file, values in plan.holds.items()}
        reading.report.findings[:0] = [_with_contents(found, held) for check in checks for found in check.result()]
    share(reading.report, reading.plans, ranks, strict=strict)
    return reading


def _agree_on_positions(run: Run, ranks: Ranks) -> None:
    """Make sure that loaders go on at the same place on all ranks: they would read different epochs otherwise."""
    with together(ranks, "Comparing a checkpoint with the run") as exchange:
        restores = exchange(run.data.restores_position)
        if any(restores) != all(restores):
            raise ConfigurationError(
                "The ranks disagree on whether load_state restores the position of loaders; got restore_position="
                f"{restores}, by rank. Pass the same DataLoaderConfiguration and set the same ACCEL_RESTORE_POSITION."
            )


def model_plans(run: Run, models: list[Any], reading: Reading) -> list[Restoration]:
    """Return how to restore the models, and report components that the run does not have."""
    reading.report.findings += stateful.extra_components(run, len(run.models), reading.source)
    return reading.chosen.format.model_restorations(run, models, reading.source)


def _choose(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any],
    model_kwargs: dict[str, Any],
    ranks: Ranks,
) -> Chosen:
    """Agree on the save that is loaded, and see which format it is in."""
    given = Path()
    with together(ranks, f"Opening the checkpoint {str(input_dir)!r}"):
        given = loaded_from(run, input_dir)
    if input_dir is None:
        given = agree_on_latest(given, ranks)
    target = Path(os.path.realpath(given))
    held = agree_on_save(target, ranks)
    with together(ranks, f"Opening the checkpoint {str(given)!r}"):
        folder = given if held is None or (held.folder == target and given.exists()) else held.folder
        manifest = Manifest.read(folder)
        size = manifest.world_size if manifest else max(1, len(list(folder.glob(f"{names.RNG_STATE_NAME}_*.pkl"))))
        source = Source(folder, manifest, size, load_kwargs, model_kwargs)
        own = recognise(source, run.strategy.format)
    return Chosen(target, source, own, whole=held is not None and held.whole)


def _begin_checks(chosen: Chosen, world: World, pool: ThreadPoolExecutor) -> list[Future[list[Finding]]]:
    """Begin to compare files with the manifest: what a machine's ranks read, each file on one of them.

    Of a checkpoint that has lost something all files are compared, so that the error lists what it lost.
    """
    manifest, folder = chosen.source.manifest, chosen.source.folder
    if manifest is None:
        return []
    machine = range(world.rank - world.local_rank, world.rank - world.local_rank + max(1, world.local_size))
    read = set(chosen.source.files()) if not chosen.whole else set().union(*(chosen.read_by(r, world) for r in machine))
    by_size = sorted((entry for entry in manifest.entries if entry.name in read), key=lambda entry: -entry.size)
    mine = [entry.name for number, entry in enumerate(by_size) if number % len(machine) == world.local_rank]
    return [pool.submit(_damage, manifest, folder, name, world.rank) for name in mine]


def _damage(manifest: Manifest, folder: Path, name: str, rank: int) -> list[Finding]:
    try:
        details = manifest.damages(folder, [name]).values()
    except UnsafeCheckpointError as error:
        return [Finding(name, "unsafe", str(error), rank)]
    except OSError as error:
        return [Finding(name, "damaged", f"{folder / name} cannot be read ({error.strerror})", rank)]
    return [Finding(name, "damaged", f"{folder / name} {detail}", rank) for detail in details]


def _with_contents(finding: Finding, held: dict[str, list[str]]) -> Finding:
    """Return what is wrong with a file, and what of a component lies in it."""
    if finding.component not in held:
        return finding
    return replace(finding, detail=f"{finding.detail}; it holds {listed(held[finding.component])}")


def examine(look: Callable[[], list[Restoration]], ranks: Ranks) -> list[Restoration]:
    """Compare on every rank; if it fails on one, all raise the same error."""
    plans: list[Restoration] = []
    with together(ranks, "Comparing a checkpoint with the run"):
        plans = look()
    return plans


def share(report: RestoreReport, plans: list[Restoration], ranks: Ranks, *, strict: bool) -> None:
    """Share the findings of all ranks; all raise the same error if the findings forbid a restore."""
    own = [*report.findings, *(found for plan in plans for found in plan.findings)]
    report.findings = list(dict.fromkeys(found for findings in ranks.exchange(own) for found in findings))
    if strict:
        error = report.error()
        if error is not None:
            raise error
