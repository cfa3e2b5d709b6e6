"""Saving the state of a run into a folder, and restoring it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accel_core.checkpoint import background, commit, names, progress, stateful
from accel_core.checkpoint.format import CheckpointFormat, Part, Source
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.plain import PLAIN
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.report import Finding, Restoration, RestoreReport
from accel_core.checkpoint.run import Run
from accel_core.checkpoint.staging import Buffers
from accel_core.checkpoint.transaction import Transaction
from accel_core.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, UnsafeCheckpointError

__all__ = ["checkpoints_folder", "load_state", "save_state"]

logger = logging.getLogger(__name__)

_buffers = Buffers()
_CHECKERS = 2


def save_state(
    run: Run,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    safe_serialization: bool = True,
    blocking: bool = True,
    **save_model_func_kwargs: Any,
) -> Any:
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
        CheckpointError: Writing failed on some rank; every rank raises the same, and what was there before is intact.
        ConfigurationError: No folder was given, or the automatic name is taken.
    """
    background.finish()
    ranks = Ranks(run.world, "save_state")
    given: list[Path] = []

    def choose() -> Path:
        given.append(_target(run, output_dir))
        return given[0]

    automatic = run.project.automatic_checkpoint_naming
    transaction = Transaction.begin(
        run.world,
        ranks,
        choose,
        each_node=run.project.save_on_each_node,
        limit=run.project.total_limit if automatic else None,
        numbered=automatic,
    )
    failure: Exception | None = None
    parts: list[Part] = []
    try:
        parts = _parts(run, transaction, safe_serialization, save_model_func_kwargs)
        if not blocking:
            _buffers.begin()
            parts = [part.snapshot(_buffers) for part in parts]
            _buffers.end()
    except Exception as error:
        failure = error
    if blocking:
        transaction.finish(parts, failure, ranks, threads=True)
        run.project.iteration += 1
        return given[0]
    own = background.own_ranks(run.world)
    run.project.iteration += 1
    return background.start(lambda: transaction.finish(parts, failure, own), given[0])


def load_state(
    run: Run,
    input_dir: str | os.PathLike[str] | None = None,
    *,
    load_kwargs: dict[str, Any] | None = None,
    strict: bool = True,
    **load_model_func_kwargs: Any,
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
            objects are read to: `"cpu"`, or `"on_device"` for the device of this rank.

    Returns:
        What was restored and what was not.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
        CheckpointDamagedError: A file is truncated, altered or lost.
        CheckpointMismatchError: The checkpoint is whole but does not fit the run.
        UnsafeCheckpointError: The checkpoint would run code, or leads outside its folder.
    """
    background.finish()
    ranks = Ranks(run.world, "load_state")
    place = load_model_func_kwargs.pop("map_location", None)
    options = {} if place is None else {"map_location": run.world.device if place == "on_device" else place}
    source = _agree_on_source(run, input_dir, options | (load_kwargs or {}), load_model_func_kwargs, ranks)
    report = RestoreReport(source.folder, source.world_size)
    models, hooks = list(run.models), list(run.load_state_pre_hooks.values())
    own_format = _format(run)

    def everything_else() -> list[Restoration]:
        found = own_format.optimizer_restorations(run, source) + stateful.restorations(run, source)
        return [*found, progress.restoration(run, source), progress.random_restoration(run, source)]

    def those_models() -> list[Restoration]:
        report.findings += stateful.extra_components(run, len(run.models), source)
        return own_format.model_restorations(run, models, source)

    with ThreadPoolExecutor(max_workers=_CHECKERS, thread_name_prefix="accel-checkpoint") as pool:
        checks = _begin_checks(run, source, pool)
        plans = _examine(everything_else, ranks)
        if not hooks:
            plans = _examine(those_models, ranks) + plans
        report.findings[:0] = [finding for check in checks for finding in check.result()]
    _share(report, plans, ranks, strict=strict)
    if hooks:
        _call_hooks(hooks, models, source, ranks)
        late = _examine(those_models, ranks)
        _share(report, late, ranks, strict=strict)
        plans = late + plans
    _apply(plans, report, ranks)
    _tell(report)
    _count_on(run, source.folder)
    return report


def _count_on(run: Run, folder: Path) -> None:
    """Let automatic naming go on behind the checkpoint that was loaded, also if a crash left it beside its name."""
    beside = names.split_beside(folder.name)
    number = (beside[1] if beside else folder.name).rpartition("_")[2]
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


def _target(run: Run, output_dir: str | os.PathLike[str] | None) -> Path:
    if run.project.automatic_checkpoint_naming:
        target = checkpoints_folder(run) / f"checkpoint_{run.project.iteration}"
        if commit.find(target) is not None:
            raise ConfigurationError(
                f"The checkpoint {str(target)!r} exists already, and automatic naming would overwrite it. Load it "
                "first, which sets the number of the next one, or set project_configuration.iteration."
            )
        return target
    if output_dir is None:
        raise ConfigurationError(
            "save_state needs to know where to; output_dir is None and automatic naming is off. "
            "Pass a folder, or use ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return Path(os.path.expanduser(output_dir))


def _format(run: Run) -> CheckpointFormat:
    """Return the format of the run's strategy; plain for one that names none."""
    chosen: CheckpointFormat | None = getattr(getattr(run, "strategy", None), "format", None)
    return PLAIN if chosen is None else chosen


def _parts(run: Run, transaction: Transaction, safe: bool, kwargs: dict[str, Any]) -> list[Part]:
    weights = [run.state_dict(model) for model in run.models]
    for hook in list(run.save_state_pre_hooks.values()):
        hook(run.models, weights, str(transaction.staging))
    writes = transaction.writes_shared
    parts = _format(run).parts(run, weights, writes=writes, safe_serialization=safe, **kwargs)
    if writes:
        parts += [*stateful.parts(run), progress.part(run)]
    return [*parts, progress.random_part(run)]


def _agree_on_source(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any],
    model_kwargs: dict[str, Any],
    ranks: Ranks,
) -> Source:
    failure: Exception | None = None
    source: Source | None = None
    try:
        folder = _folder(run, input_dir)
        manifest = Manifest.read(folder)
        size = manifest.world_size if manifest else max(1, len(list(folder.glob(f"{names.RNG_STATE_NAME}_*.pkl"))))
        source = Source(folder, manifest, size, load_kwargs, model_kwargs)
    except (CheckpointError, ConfigurationError, OSError) as error:
        failure = error
    ranks.agree(failure, f"Opening the checkpoint {str(input_dir)!r}")
    if source is None:
        raise CheckpointError(f"The checkpoint {str(input_dir)!r} was not opened; found no cause. Pass another folder.")
    return source


def _folder(run: Run, input_dir: str | os.PathLike[str] | None) -> Path:
    if input_dir is not None:
        target = Path(os.path.expanduser(input_dir))
        return commit.find(target) or target
    if not run.project.automatic_checkpoint_naming:
        raise ConfigurationError(
            "load_state needs to know where from; input_dir is None and automatic naming is off. Pass a folder."
        )
    folder = checkpoints_folder(run)
    latest = commit.latest(folder)
    if latest is None:
        raise CheckpointNotFoundError(
            f"There is no complete checkpoint in {str(folder)!r}; found {len(commit.numbered(folder))} folders named "
            "checkpoint_<number>. Start the run from the beginning."
        )
    return latest


def _begin_checks(run: Run, source: Source, pool: ThreadPoolExecutor) -> list[Future[list[Finding]]]:
    """Begin to compare the files with the manifest; the ranks of a machine share the work."""
    if source.manifest is None:
        return []
    world = run.world
    mine = [entry.name for number, entry in enumerate(_by_size(source.manifest)) if _falls_to(number, world)]
    return [pool.submit(_damage, source.manifest, source.folder, name, world.rank) for name in mine]


def _damage(manifest: Manifest, folder: Path, name: str, rank: int) -> list[Finding]:
    try:
        details = manifest.damages(folder, [name]).values()
    except UnsafeCheckpointError as error:
        return [Finding(name, "unsafe", str(error), rank)]
    except OSError as error:
        return [Finding(name, "damaged", f"{folder / name} cannot be read ({error.strerror})", rank)]
    return [Finding(name, "damaged", f"{folder / name} {detail}", rank) for detail in details]


def _by_size(manifest: Manifest) -> list[Any]:
    return sorted(manifest.entries, key=lambda entry: -entry.size)


def _falls_to(number: int, world: Any) -> bool:
    return bool(number % max(1, world.local_size) == world.local_rank)


def _examine(look: Callable[[], list[Restoration]], ranks: Ranks) -> list[Restoration]:
    failure: Exception | None = None
    plans: list[Restoration] = []
    try:
        plans = look()
    except Exception as error:
        failure = error
    ranks.agree(failure, "Comparing a checkpoint with the run")
    return plans


def _share(report: RestoreReport, plans: list[Restoration], ranks: Ranks, *, strict: bool) -> None:
    """Let every rank know what every rank found; raise the same everywhere if that forbids a restore."""
    own = [*report.findings, *(found for plan in plans for found in plan.findings)]
    report.findings = list(dict.fromkeys(found for findings in ranks.exchange(own) for found in findings))
    if strict:
        error = report.error()
        if error is not None:
            raise error


def _call_hooks(hooks: list[Callable[..., None]], models: list[Any], source: Source, ranks: Ranks) -> None:
    failure: Exception | None = None
    try:
        for hook in hooks:
            hook(models, str(source.folder))
    except Exception as error:
        failure = error
    ranks.agree(failure, "Calling the load hooks")


def _apply(plans: list[Restoration], report: RestoreReport, ranks: Ranks) -> None:
    """Restore what fits on all ranks alike."""
    bad = {found.component for found in report.findings if found.kind != "extra"}
    lost = {found.component for found in report.findings if found.kind in ("damaged", "unsafe")}
    failure: Exception | None = None
    try:
        for plan in plans:
            if plan.component not in bad and not plan.files & lost:
                plan.apply()
                report.restored.append(plan.component)
            elif plan.partial and plan.component not in lost and not plan.files & lost:
                plan.apply()
                report.partial.append(plan.component)
    except Exception as error:
        failure = error
    ranks.agree(
        failure,
        f"Restoring from {str(report.folder)!r}, whose parts had been found to fit,",
        "The run is restored in part only; start it again.",
    )


def _tell(report: RestoreReport) -> None:
    if report.findings:
        logger.warning("Not everything in the checkpoint %s was restored:\n%s", report.folder, report)
