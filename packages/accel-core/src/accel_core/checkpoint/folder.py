"""Saving the state of a run into a folder, and restoring it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_core._records import record
from accel_core.checkpoint import background, names, progress, stateful
from accel_core.checkpoint.agreement import agree_on_latest, agree_on_save, together
from accel_core.checkpoint.format import CheckpointFormat, Exchange, Part, Run, Source
from accel_core.checkpoint.formats import recognise
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.opened import Opened
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.report import Finding, Restoration, RestoreReport, listed
from accel_core.checkpoint.staging import Buffers
from accel_core.checkpoint.transaction import Transaction
from accel_core.errors import CheckpointDamagedError, CheckpointError, ConfigurationError, UnsafeCheckpointError
from accel_core.process.world import World

__all__ = ["checkpoints_folder", "load_state", "placement", "save_state"]

logger = logging.getLogger(__name__)

_buffers = Buffers()
_CHECKERS = 2
_ATTEMPTS = 10
_PAUSE = 0.001


def save_state(
    run: Run,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    safe_serialization: bool = True,
    blocking: bool = True,
    **save_model_func_kwargs: object,
) -> Path | background.Handle:
    """Save everything that a run needs to go on, in one step.

    Every rank calls it, and leaves it when the checkpoint is complete. A kill at any instant leaves the previous or the
    new checkpoint.

    Args:
        run: The run.
        output_dir: Folder for the checkpoint; not used with automatic naming.
        safe_serialization: Write weights as safetensors.
        blocking: Wait until the checkpoint is complete. Otherwise copy the state and write in the background.
        **save_model_func_kwargs: Passed to the strategy's format.

    Returns:
        The folder; with `blocking=False` a `background.Handle`.

    Raises:
        CheckpointError: Writing failed on some rank; every rank raises the same, and it says which checkpoint stands.
        ConfigurationError: No folder was given, or the automatic name is taken.
    """
    background.finish()
    ranks = Ranks(run.world, "save_state")
    automatic = run.project.automatic_checkpoint_naming
    given = Path()
    with together(ranks, "Preparing a checkpoint"):
        given = _target(run, output_dir)
    transaction = Transaction.begin(
        run.world,
        ranks,
        Path(os.path.realpath(given)),
        each_node=run.project.save_on_each_node,
        limit=run.project.total_limit if automatic else None,
        numbered=automatic,
    )
    parts: list[Part] = []
    doing = f"Collecting the state for the checkpoint {str(given)!r}"
    try:
        with together(ranks, doing):
            weights = run.strategy.format.weights(run)
            for hook in list(run.save_state_pre_hooks.values()):
                hook(run.models, weights, str(transaction.staging))
        hooked = transaction.written_by_hooks()
        with together(ranks, doing) as exchange:
            options = {"safe_serialization": safe_serialization} | save_model_func_kwargs
            parts = _parts(run, exchange, transaction.writes_shared, weights, **options)
            if not blocking:
                _buffers.begin()
                parts = [part.snapshot(_buffers) for part in parts]
                _buffers.end()
    except BaseException:
        transaction.abandon()
        raise
    if blocking:
        transaction.finish(parts, hooked, ranks, threads=True)
        run.project.iteration += 1
        return given
    own = background.own_ranks(run.world)
    run.project.iteration += 1
    return background.start(lambda: transaction.finish(parts, hooked, own), given)


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

    Args:
        run: The run.
        input_dir: The checkpoint; with automatic naming, `None` is the latest complete one.
        load_kwargs: Passed to `torch.load` for everything but models (`map_location`).
        strict: Raise if anything is missing, unexpected or damaged. Otherwise restore what fits.
        **load_model_func_kwargs: Passed to `load_state_dict` of models (`assign`). `map_location` says where plain
            optimizers are read to: `"cpu"`, or `"on_device"` for the device of this rank.

    Returns:
        What was restored and what was not.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
        CheckpointDamagedError: A file is truncated, altered or lost.
        CheckpointMismatchError: The checkpoint is whole but does not fit the run.
        UnsafeCheckpointError: The checkpoint would run code, or leads outside its folder.
        TypeError: `map_location` is something else.
    """
    background.finish()
    ranks = Ranks(run.world, "load_state")
    options = placement(load_model_func_kwargs.pop("map_location", None), run.world)
    reading = _read(run, input_dir, options | (load_kwargs or {}), load_model_func_kwargs, ranks, strict=strict)
    report, plans = reading.report, reading.plans
    hooks = list(run.load_state_pre_hooks.values())
    if hooks:
        late = _load_after_hooks(run, hooks, reading, ranks)
        _share(report, late, ranks, strict=strict)
        plans = late + plans
    _apply(plans, reading, ranks)
    _tell(report)
    _count_on(run, reading.opened.target)
    return report


@record(frozen=True)
class _Chosen:
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
        """Return the names that a rank reads: what the format says, without the random states of others."""
        ranks = self.source.world_size
        own = names.random_states_name(rank if rank < ranks else rank % ranks)
        read = self.format.files_of(self.source, rank, world.size)
        return {name for name in read if name == own or not name.startswith(names.RNG_STATE_NAME)}


@record
class _Reading:
    """A checkpoint that was compared with the run.

    Attributes:
        chosen: Which.
        opened: What its files were when reading began.
        report: What was found.
        plans: How what was compared is restored.
    """

    chosen: _Chosen
    opened: Opened
    report: RestoreReport
    plans: list[Restoration]

    @property
    def source(self) -> Source:
        """Where it is read from."""
        return self.chosen.source


def _read(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any],
    model_kwargs: dict[str, Any],
    ranks: Ranks,
    *,
    strict: bool,
) -> _Reading:
    """Compare a checkpoint with the run, from the beginning again whenever another process replaced it meanwhile."""
    for attempt in range(_ATTEMPTS):
        chosen = _choose(run, input_dir, load_kwargs, model_kwargs, ranks)
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


def _compare(run: Run, chosen: _Chosen, opened: Opened, ranks: Ranks, *, strict: bool) -> _Reading:
    """Compare everything that can be compared before load hooks are called."""
    source = chosen.source
    reading = _Reading(chosen, opened, RestoreReport(source.folder, source.world_size), [])

    def everything_else() -> list[Restoration]:
        found = chosen.format.optimizer_restorations(run, source) + stateful.restorations(run, source)
        return [*found, progress.restoration(run, source), progress.random_restoration(run, source)]

    with ThreadPoolExecutor(max_workers=_CHECKERS, thread_name_prefix="accel-checkpoint") as pool:
        checks = _begin_checks(chosen, run.world, pool)
        reading.plans = _examine(everything_else, ranks)
        if not run.load_state_pre_hooks:
            reading.plans = _examine(lambda: _model_plans(run, list(run.models), reading), ranks) + reading.plans
        held = {file: values for plan in reading.plans for file, values in plan.holds.items()}
        reading.report.findings[:0] = [_with_contents(found, held) for check in checks for found in check.result()]
    _share(reading.report, reading.plans, ranks, strict=strict)
    return reading


def _model_plans(run: Run, models: list[Any], reading: _Reading) -> list[Restoration]:
    reading.report.findings += stateful.extra_components(run, len(run.models), reading.source)
    return reading.chosen.format.model_restorations(run, models, reading.source)


def _load_after_hooks(run: Run, hooks: list[Callable[..., None]], reading: _Reading, ranks: Ranks) -> list[Restoration]:
    """Let load hooks do their part, and compare the models that they left to be loaded."""
    models = list(run.models)
    with together(ranks, "Calling the load hooks"):
        for hook in hooks:
            hook(models, str(reading.source.folder))
    late = _examine(lambda: _model_plans(run, models, reading), ranks)
    if any(ranks.exchange(reading.opened.replaced())):
        raise CheckpointError(
            f"The checkpoint {str(reading.source.folder)!r} was replaced while load hooks read it; got another save "
            "there. Start the run again: what the hooks loaded may be of two saves."
        )
    return late


def _count_on(run: Run, target: Path) -> None:
    """Continue automatic numbering after the loaded checkpoint, wherever a crash left its files."""
    number = target.name.rpartition("_")[2]
    if run.project.automatic_checkpoint_naming and number.isdecimal():
        run.project.iteration = max(run.project.iteration, int(number) + 1)


def checkpoints_folder(run: Run) -> Path:
    """Return where automatically named checkpoints lie.

    Raises:
        ConfigurationError: The project has no folder.
    """
    if run.project.project_dir is None:
        raise ConfigurationError(
            "Automatic checkpoint naming needs the folder of the project; project_dir is None. "
            "Pass Accelerator(project_dir=...)."
        )
    return Path(run.project.project_dir) / "checkpoints"


def placement(place: object, world: World) -> dict[str, Any]:
    """Return what `torch.load` is told of the place that a user asked for.

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


def _target(run: Run, output_dir: str | os.PathLike[str] | None) -> Path:
    if run.project.automatic_checkpoint_naming:
        return checkpoints_folder(run) / f"checkpoint_{run.project.iteration}"
    if output_dir is None:
        raise ConfigurationError(
            "save_state needs to know where to; output_dir is None and automatic naming is off. "
            "Pass a folder, or use ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return Path(os.path.expanduser(output_dir))


def _parts(run: Run, exchange: Exchange, writes: bool, weights: list[dict[str, Any]], **kwargs: Any) -> list[Part]:
    """Return what this rank writes."""
    parts = run.strategy.format.parts(run, weights, writes=writes, exchange=exchange, **kwargs)
    if writes:
        parts += [*stateful.parts(run), progress.part(run)]
    return [*parts, progress.random_part(run)]


def _choose(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any],
    model_kwargs: dict[str, Any],
    ranks: Ranks,
) -> _Chosen:
    """Agree on the save that is loaded, and see which format it is in."""
    given = Path()
    with together(ranks, f"Opening the checkpoint {str(input_dir)!r}"):
        given = _asked_for(run, input_dir)
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
    return _Chosen(target, source, own, whole=held is not None and held.whole)


def _asked_for(run: Run, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder to load, or the one in which the latest checkpoint is to be found."""
    if input_dir is not None:
        return Path(os.path.expanduser(input_dir))
    if not run.project.automatic_checkpoint_naming:
        raise ConfigurationError(
            "load_state needs to know where from; input_dir is None and automatic naming is off. Pass a folder."
        )
    return checkpoints_folder(run)


def _begin_checks(chosen: _Chosen, world: World, pool: ThreadPoolExecutor) -> list[Future[list[Finding]]]:
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


def _examine(look: Callable[[], list[Restoration]], ranks: Ranks) -> list[Restoration]:
    plans: list[Restoration] = []
    with together(ranks, "Comparing a checkpoint with the run"):
        plans = look()
    return plans


def _share(report: RestoreReport, plans: list[Restoration], ranks: Ranks, *, strict: bool) -> None:
    """Let every rank know what every rank found; raise the same everywhere if that forbids a restore."""
    own = [*report.findings, *(found for plan in plans for found in plan.findings)]
    report.findings = list(dict.fromkeys(found for findings in ranks.exchange(own) for found in findings))
    if strict:
        error = report.error()
        if error is not None:
            raise error


def _apply(plans: list[Restoration], reading: _Reading, ranks: Ranks) -> None:
    """Restore what fits on all ranks alike."""
    report = reading.report
    bad = {found.component for found in report.findings if found.kind != "extra"}
    lost = {found.component for found in report.findings if found.kind in ("damaged", "unsafe")}
    doing = f"Restoring from {str(report.folder)!r}, whose parts had been found to fit,"
    with together(ranks, doing, "The run is restored in part only; start it again."):
        for plan in plans:
            if plan.component not in bad and not plan.files & lost:
                plan.apply()
                report.restored.append(plan.component)
            elif plan.partial and plan.component not in lost and not plan.files & lost:
                plan.apply()
                report.partial.append(plan.component)
        if reading.opened.altered():
            raise CheckpointDamagedError(
                f"A file of the checkpoint {str(report.folder)!r} was written into while it was read; got another "
                "time of change. Save with accel, which replaces files and never writes into one."
            )


def _tell(report: RestoreReport) -> None:
    if report.findings:
        logger.warning("Not everything in the checkpoint %s was restored:\n%s", report.folder, report)
