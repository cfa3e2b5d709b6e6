"""Restoring the state of a run from a folder: everything is read and compared before anything is changed.

1. The ranks agree which save they load, and see which format it is in (`_select`).
2. `FileSnapshot.take` notes what its files are now. Threads compare them with the manifest, while each part of the run
   compares itself with what is stored for it (`Restoration`); the ranks exchange their findings. If another process
   put another save in the place meanwhile, it all begins again.
3. If anything is damaged or does not fit, every rank raises the same error, and nothing was changed.
4. Load hooks are called; the models that they left are compared.
5. Each `Restoration` is applied. Only a failure in this step leaves a run that is restored in part.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_core._records import record
from accel_core.checkpoint import background, commit, names, progress, stateful
from accel_core.checkpoint.agreement import agree_on_latest, agree_on_save, together
from accel_core.checkpoint.format import CheckpointFormat, Run, Source
from accel_core.checkpoint.formats import recognise
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.places import loaded_from
from accel_core.checkpoint.plain import models_for_hooks
from accel_core.checkpoint.ranks import Ranks, described
from accel_core.checkpoint.report import Finding, Restoration, RestoreReport, listed
from accel_core.comm.disagreement import ranks_text
from accel_core.errors import CheckpointDamagedError, CheckpointError, ConfigurationError, UnsafeCheckpointError
from accel_core.modules.unwrap import extract_model_from_parallel
from accel_core.process.world import World

__all__ = ["load_state", "placement"]

logger = logging.getLogger(__name__)

_CHECKERS = 2
_ATTEMPTS = 10
_PAUSE = 0.001


def load_state(
    run: Run,
    input_dir: str | os.PathLike[str] | None = None,
    *,
    load_kwargs: dict[str, Any] | None = None,
    strict: bool = True,
    **load_model_func_kwargs: object,
) -> RestoreReport:
    """Restore what `save_state` saved, here or in Accelerate.

    Every rank calls it. Everything is read and compared first; nothing is changed unless all of it fits on all ranks.
    Load hooks are called when everything but the models was found to fit.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
        CheckpointDamagedError: A file is truncated, altered or lost.
        CheckpointMismatchError: The checkpoint is whole but does not fit the run.
        UnsafeCheckpointError: The checkpoint would run code, or leads outside its folder.
        ConfigurationError: A keyword was given that the models' `load_state_dict` does not take.
        TypeError: `map_location` is something else.
    """
    background.finish()
    ranks = Ranks(run.world, "load_state")
    options = placement(load_model_func_kwargs.pop("map_location", None), run.world)
    options |= load_kwargs or {}
    reading = read_and_compare(run, input_dir, options, load_model_func_kwargs, ranks, strict=strict)
    report, plans = reading.report, reading.plans
    if run.world.is_main:
        logger.info("Loading states from %s", report.folder)
    hooks = list(run.load_state_pre_hooks.values())
    if hooks:
        late = _load_after_hooks(run, hooks, reading, ranks)
        exchange_findings(report, late, ranks, strict=strict)
        plans = late + plans
    _apply(plans, reading, ranks)
    _tell(report, run)
    _count_on(run, reading.snapshot.target)
    return report


def placement(place: object, world: World) -> dict[str, Any]:
    """Return the arguments of `torch.load` for the `map_location` that a user asked for.

    Raises:
        TypeError: It is neither `None`, `"cpu"` nor `"on_device"`.
    """
    if place is None:
        return {}
    if place not in ("cpu", "on_device"):
        raise TypeError(
            f'map_location says where optimizers are read to; got {place!r}. Pass None, "cpu" or "on_device", or '
            'load_kwargs={"map_location": ...} for anything that torch.load takes.'
        )
    return {"map_location": world.device if place == "on_device" else "cpu"}


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
            selected = _select(run, input_dir, load_kwargs, model_kwargs, ranks)
        except CheckpointError:  # the same on every rank
            if not any(ranks.exchange(_series(run, input_dir) != series)):
                raise
            time.sleep(_PAUSE * 2**attempt)
            continue
        read = sorted(selected.read_by(run.world.rank, run.world))
        snapshot = FileSnapshot.take(selected.target, selected.source.folder, read)
        failure: CheckpointError | None = None
        reading = None
        try:
            reading = _compare(run, selected, snapshot, ranks, strict=strict)
        except CheckpointError as error:  # the same on every rank, so every rank comes to the question below
            failure = error
        if not any(ranks.exchange(snapshot.replaced())):
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


def _select(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any],
    model_kwargs: dict[str, Any],
    ranks: Ranks,
) -> Selected:
    """Agree on the save that is loaded, and see which format it is in."""
    given = Path()
    with together(ranks, f"Opening the checkpoint {str(input_dir)!r}"):
        _check_keywords(run, model_kwargs)
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
    return Selected(target, source, own, whole=held is not None and held.whole)


def _check_keywords(run: Run, given: Mapping[str, object]) -> None:
    """Refuse keywords of `load_state` that a model's `load_state_dict` does not take."""
    for model in run.models if given else ():
        method = extract_model_from_parallel(model, keep_torch_compile=False).load_state_dict
        try:
            inspect.signature(method).bind({}, strict=False, **given)
        except TypeError as error:
            raise ConfigurationError(
                "load_state takes input_dir, load_kwargs and strict, and passes other keywords on to the models' "
                f"load_state_dict; got {', '.join(sorted(given))}, which that of {type(model).__name__} does not take "
                f"({error}). Pass the folder as input_dir, and in load_kwargs what reads optimizers and schedules."
            ) from None


def _compare(run: Run, selected: Selected, snapshot: FileSnapshot, ranks: Ranks, *, strict: bool) -> Reading:
    """Compare everything that can be compared before load hooks are called."""
    source = selected.source
    _agree_on_positions(run, ranks)
    report = RestoreReport(source.folder, source.world_size)
    report.absent = source.manifest.absent if source.manifest else 0
    report.reseeded = list(range(source.world_size, run.world.size))
    reading = Reading(selected, snapshot, report, [])

    def everything_else() -> list[Restoration]:
        # The scaler before the optimizers: one that steps while it is loaded does so at the scale of the checkpoint.
        found = stateful.scaler_restorations(run, source) + selected.format.optimizer_restorations(run, source)
        found += stateful.restorations(run, source)
        return [*found, progress.restoration(run, source), progress.random_restoration(run, source)]

    with ThreadPoolExecutor(max_workers=_CHECKERS, thread_name_prefix="accel-checkpoint") as pool:
        checks = _begin_checks(selected, run.world, pool)
        reading.plans = compare_on_all(everything_else, ranks)
        if not run.load_state_pre_hooks:
            reading.plans = compare_on_all(lambda: model_plans(run, list(run.models), reading), ranks) + reading.plans
        held = {file: values for plan in reading.plans for file, values in plan.holds.items()}
        reading.report.findings[:0] = [_with_contents(found, held) for check in checks for found in check.result()]
    exchange_findings(reading.report, reading.plans, ranks, strict=strict)
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
    return reading.selected.format.model_restorations(run, models, reading.source)


def compare_on_all(look: Callable[[], list[Restoration]], ranks: Ranks) -> list[Restoration]:
    """Compare on every rank; if it fails on one, all raise the same error."""
    plans: list[Restoration] = []
    with together(ranks, "Comparing a checkpoint with the run"):
        plans = look()
    return plans


def _begin_checks(selected: Selected, world: World, pool: ThreadPoolExecutor) -> list[Future[list[Finding]]]:
    """Begin to compare files with the manifest: what a machine's ranks read, each file on one of them.

    Of a checkpoint that has lost something all files are compared, so that the error lists what it lost.
    """
    manifest, folder = selected.source.manifest, selected.source.folder
    if manifest is None:
        return []
    machine = range(world.rank - world.local_rank, world.rank - world.local_rank + max(1, world.local_size))
    read = (
        set(selected.source.files())
        if not selected.whole
        else set().union(*(selected.read_by(r, world) for r in machine))
    )
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


def exchange_findings(report: RestoreReport, plans: list[Restoration], ranks: Ranks, *, strict: bool) -> None:
    """Share the findings of all ranks; all raise the same error if the findings forbid a restore."""
    own = [*report.findings, *(found for plan in plans for found in plan.findings)]
    report.findings = list(dict.fromkeys(found for findings in ranks.exchange(own) for found in findings))
    if strict:
        error = report.error()
        if error is not None:
            raise error


def _load_after_hooks(run: Run, hooks: list[Callable[..., None]], reading: Reading, ranks: Ranks) -> list[Restoration]:
    """Let load hooks do their part, and compare the models that they left to be loaded."""
    models = models_for_hooks(run)
    prepared = dict(zip(map(id, models), run.models, strict=True))
    doing = f"Calling the load hooks for the checkpoint {str(reading.source.folder)!r}"
    with together(ranks, doing, "What they loaded stays; start the run again."):
        for hook in hooks:
            hook(models, str(reading.source.folder))
    left = [prepared.get(id(model), model) for model in models]
    late = compare_on_all(lambda: model_plans(run, left, reading), ranks)
    if any(ranks.exchange(reading.snapshot.replaced())):
        raise CheckpointError(
            f"The checkpoint {str(reading.source.folder)!r} was replaced while load hooks read it; got another save "
            "there. Start the run again: what the hooks loaded may be of two saves."
        )
    return late


def _apply(plans: list[Restoration], reading: Reading, ranks: Ranks) -> None:
    """Restore what fits on all ranks alike."""
    report = reading.report
    bad = {found.component for found in report.findings if found.kind != "extra"}
    lost = {found.component for found in report.findings if found.kind in ("damaged", "unsafe")}
    doing = f"Restoring from {str(report.folder)!r}, whose parts had been found to fit,"
    with together(ranks, doing, "The run is restored in part only; start it again."):
        for plan in plans:
            if plan.component not in bad and not plan.files & lost:
                _restore(plan, report, report.restored)
            elif plan.partial and plan.component not in lost and not plan.files & lost:
                _restore(plan, report, report.partial)
        if reading.snapshot.altered():
            raise CheckpointDamagedError(
                f"A file of the checkpoint {str(report.folder)!r} was written into while it was read, and all of it "
                "was restored already; got another time of change. Start the run again, from a checkpoint that was "
                "saved with accel, which replaces files and never writes into one."
            )


def _restore(plan: Restoration, report: RestoreReport, done: list[str]) -> None:
    """Restore one component; where it fails, say which it is and what of the run is not as it was before."""
    try:
        plan.apply()
    except Exception as failure:
        kind, text = described(failure)
        before = ", ".join([*report.restored, *report.partial]) or "nothing"
        raise kind(
            f"The checkpoint {str(report.folder)!r} fits the run, and its {plan.component} could not be restored; got "
            f"{text.rstrip('.')}. Restored before it: {before}. Remove the cause, and start the run again, as it is "
            "restored in part only."
        ) from failure
    done.append(plan.component)


def _tell(report: RestoreReport, run: Run) -> None:
    if run.dataloaders and run.world.is_main and not run.data.restores_position:
        logger.info(
            "Loaders begin an epoch after load_state, as in Accelerate; they go on where they were saved with "
            "DataLoaderConfiguration(restore_position=True) or ACCEL_RESTORE_POSITION=1."
        )
    if report.findings:
        logger.warning("Not everything in the checkpoint %s was restored:\n%s", report.folder, report)
    if report.absent and report.reseeded and run.world.is_main:
        logger.warning(
            "The checkpoint %s was saved by rank 0 alone: the random generators of %s are seeded anew.",
            report.folder,
            ranks_text(report.reseeded),
        )


def _count_on(run: Run, target: Path) -> None:
    """Continue automatic numbering after the loaded checkpoint, wherever a crash left its files."""
    number = target.name.rpartition("_")[2]
    if run.project.automatic_checkpoint_naming and number.isdecimal():
        run.project.iteration = max(run.project.iteration, int(number) + 1)


@record(frozen=True)
class Selected:
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
        selected: Which.
        snapshot: What its files were when reading began.
        report: What was found.
        plans: How what was compared is restored.
    """

    selected: Selected
    snapshot: FileSnapshot
    report: RestoreReport
    plans: list[Restoration]

    @property
    def source(self) -> Source:
        """Where it is read from."""
        return self.selected.source


Seen = tuple[int, int, int, int]
"""Device, inode, size and time of the last change of a file's content."""


@record(frozen=True)
class FileSnapshot:
    """What the files of a checkpoint were when reading began.

    No save writes into a file that has a public name: it puts another file there. So, as long as every name still means
    the file that it meant at the beginning, everything that was read in between is of one save.

    Attributes:
        target: The folder that was saved to.
        folder: Where its files are read.
        files: What each name meant; `None` for one that was not there.
    """

    target: Path
    folder: Path
    files: dict[str, Seen | None]

    @classmethod
    def take(cls, target: Path, folder: Path, read: list[str]) -> FileSnapshot:
        """Record which files the names that are about to be read refer to now."""
        return cls(target, folder, {name: _seen(folder / name) for name in [*read, names.MANIFEST_NAME]})

    def replaced(self) -> bool:
        """Return whether any name means another file now, or another save counts."""
        if any(_seen(self.folder / name) != seen for name, seen in self.files.items()):
            return True
        try:
            return not any(_same(held.folder, self.folder) for held in commit.saves_of(self.target))
        except (FileNotFoundError, NotADirectoryError):  # another process deletes the checkpoint at this moment
            return True

    def altered(self) -> bool:
        """Return whether anything was written into a file that has its name still, which no save of accel does."""
        now = {name: _seen(self.folder / name) for name in self.files}
        return any(
            seen is not None and found is not None and seen[:2] == found[:2] and seen != found
            for seen, found in ((seen, now[name]) for name, seen in self.files.items())
        )


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _seen(path: Path) -> Seen | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
