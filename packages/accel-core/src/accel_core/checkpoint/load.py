"""Restoring the state of a run: everything is read and compared before anything is changed.

1. `_open`: the main rank chooses the save and reads the lists of its files; the others see that theirs is the same.
2. `Storage.fetch` brings what ranks read to their machine. Threads compare the files with the manifest, while each part
   of the run compares itself with what is stored for it (`Restoration`); the ranks exchange their findings.
3. If anything is damaged or does not fit, every rank raises the same error, and nothing was changed.
4. Load hooks are called; the models that they left are compared.
5. Each `Restoration` is applied. Only a failure in this step leaves a run that is restored in part.

A save that is committed to the same place meanwhile is an error: load again.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch

from accel_core._records import record
from accel_core.checkpoint import background, names, selection, stateful
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.format import CheckpointFormat, Exchange, Run, Source
from accel_core.checkpoint.formats import recognise
from accel_core.checkpoint.manifest import Manifest
from accel_core.checkpoint.plain import models_for_hooks
from accel_core.checkpoint.ranks import Ranks, described
from accel_core.checkpoint.report import Finding, Restoration, RestoreReport, listed
from accel_core.checkpoint.storage import Storage, place_of, storage_of
from accel_core.comm.disagreement import ranks_text
from accel_core.comm.transport import known_to_all
from accel_core.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError, UnsafeCheckpointError
from accel_core.modules import reduction_order
from accel_core.modules.unwrap import extract_model_from_parallel
from accel_core.process.world import World
from accel_core.state.run import first_tensor_parallel_rank
from accel_core.tqdm import byte_bar, moved

logger = logging.getLogger(__name__)

_CHECKERS = 2


def load_state(
    run: Run,
    input_dir: str | os.PathLike[str] | None = None,
    *,
    load_kwargs: dict[str, Any] | None = None,
    strict: bool = True,
    **load_model_func_kwargs: object,
) -> RestoreReport:
    """Restore what `save_state` saved, here or in Accelerate, with the errors that `Accelerator.load_state` lists.

    Every rank calls it. Everything is read and compared first; nothing is changed unless all of it fits on all ranks.
    Load hooks are called when everything but the models was found to fit.
    """
    # The save under way may be the one that is loaded.
    background.finish()
    options = placement(load_model_func_kwargs.pop("map_location", None), run.world) | (load_kwargs or {})
    ranks = Ranks(run.world, "load_state")
    with ranks.together(f"Opening the checkpoint {str(input_dir)!r}"):
        _check_call(run, load_model_func_kwargs)
        given = place_of(input_dir, run.project, "load_state", "input_dir")
        storage = storage_of(given, run.world, run.project)
    if input_dir is None:
        storage = _newest(run, ranks, storage)
    try:
        with byte_bar("Loading"):
            reading = _open(run, ranks, storage, options, load_model_func_kwargs)
            _compare(reading, strict)
        if run.world.is_main:
            logger.info("Loading states from %s", reading.report.folder)
        if run.load_state_pre_hooks:
            reading.plans = _call_hooks(reading, strict) + reading.plans
        _refuse_replaced(reading, f"nothing was changed{' but by load hooks' if run.load_state_pre_hooks else ''}")
        _apply(reading)
        _refuse_replaced(reading, "all of it was restored, of which something may be of the other save")
        reduction_order.follow(run.models, ranks.exchange)
    finally:
        storage.close()
    number = storage.target.name.rpartition("_")[2]
    if run.project.automatic_checkpoint_naming and number.isdecimal():
        # The next save comes after this one, wherever a crash left its files.
        run.project.iteration = max(run.project.iteration, int(number) + 1)
    _log(reading.report, run)
    return reading.report


def _machine(world: World) -> range:
    """Return the ranks of this machine."""
    first = world.rank - world.local_rank
    return range(first, first + max(1, world.local_size))


def placement(place: object, world: World) -> dict[str, Any]:
    """Return the arguments of `torch.load` for the `map_location` that a user asked for."""
    if place is None:
        return {}
    if place not in ("cpu", "on_device"):
        raise TypeError(
            f'map_location says where optimizers are read to; got {place!r}. Pass None, "cpu" or "on_device", or '
            'load_kwargs={"map_location": ...} for anything that torch.load takes.'
        )
    return {"map_location": world.device if place == "on_device" else "cpu"}


def _newest(run: Run, ranks: Ranks, series: Storage) -> Storage:
    """Return where the latest checkpoint of a series is, which the main rank chooses."""
    newest: Path | CheckpointNotFoundError | None = None
    with ranks.together(f"Looking for checkpoints in {str(series.target)!r}"):
        if ranks.rank == 0:
            try:
                newest = series.newest()
            except CheckpointNotFoundError as error:  # which all ranks raise as one
                newest = error
    found = ranks.broadcast(newest)
    if not isinstance(found, Path):
        raise known_to_all(found or CheckpointNotFoundError(str(series.target)))
    return storage_of(found, run.world, run.project)


def _open(run: Run, ranks: Ranks, storage: Storage, options: dict[str, Any], model_kwargs: dict[str, Any]) -> Reading:
    """Agree on what the checkpoint is made of, see which format it is in, and bring what ranks read to this machine."""
    doing = f"Opening the checkpoint {str(storage.target)!r}"
    folder, manifest = storage.open(ranks)
    with ranks.together(doing):
        # Accelerate writes down no number of ranks, but a file of random states for each.
        size = manifest.world_size if manifest else max(1, len(list(folder.glob(f"{names.RNG_STATE_NAME}_*.pkl"))))
        source = Source(folder, manifest, size, options, model_kwargs)
        own = recognise(source, run.strategy.format)
        shown = storage.target if isinstance(storage.target, Address) else folder
        report = RestoreReport(shown, size, absent=manifest.absent if manifest else 0)
        report.reseeded = [
            rank for rank in range(run.world.size) if not source.has(names.random_states_name(rank)) or rank >= size
        ]
        reading = Reading(run, ranks, storage, source, own, report, None)
    # Hooks may read anything.
    storage.fetch(source.files() if run.load_state_pre_hooks else reading.read_by(*_machine(run.world)), ranks)
    with ranks.together(doing):
        reading.part = report.part = selection.selected(source)
        if reading.part is not None:
            report.reseeded = []
    read = reading.read_by(run.world.rank)
    moved(0, sum(entry.size for entry in manifest.entries if entry.name in read) if manifest else None)
    return reading


def _refuse_replaced(reading: Reading, done: str) -> None:
    """Refuse a checkpoint in whose place another save was committed while it was read, on every rank."""
    if any(reading.ranks.exchange(reading.storage.is_replaced())):
        raise CheckpointError(
            f"The checkpoint {str(reading.storage.target)!r} was replaced while it was read; got another save in its "
            f"place, and {done}. Load it again when nothing saves there."
        )


def _check_call(run: Run, given: dict[str, Any]) -> None:
    """Refuse keywords of `load_state` that a model's `load_state_dict` does not take, and to load where none can."""
    if torch.is_inference_mode_enabled():
        raise CheckpointError(
            "Tensors that are made in inference mode can never train; got load_state under torch.inference_mode(). "
            "Call it outside of that block, or use torch.no_grad()."
        )
    for model in run.models if given else ():
        method = extract_model_from_parallel(model, keep_torch_compile=False).load_state_dict
        try:
            # Bound and not called: no model may change before everything was compared.
            inspect.signature(method).bind({}, strict=False, **given)
        except TypeError as error:
            raise ConfigurationError(
                "load_state takes input_dir, load_kwargs and strict, and passes other keywords on to the models' "
                f"load_state_dict; got {', '.join(sorted(given))}, which that of {type(model).__name__} does not take "
                f"({error}). Pass the folder as input_dir, and in load_kwargs what reads optimizers and schedules."
            ) from None


def _compare(reading: Reading, strict: bool) -> None:
    """Compare everything that can be compared before load hooks are called."""
    run, source, report = reading.run, reading.source, reading.report

    def all_but_models(exchange: Exchange) -> list[Restoration]:
        restores = exchange(run.data.restores_position)
        if any(restores) != all(restores):  # they would read different epochs
            raise ConfigurationError(
                "The ranks disagree on whether load_state restores the position of loaders; got restore_position="
                f"{restores}, by rank. Pass the same DataLoaderConfiguration and set the same ACCEL_RESTORE_POSITION."
            )
        if reading.part is not None:
            return []
        report.findings += stateful.extra_components(run, source)
        return stateful.restorations(run, source, reading.format.optimizer_restorations(run, source))

    with ThreadPoolExecutor(max_workers=_CHECKERS, thread_name_prefix="accel-checkpoint") as pool:
        checks = _begin_checks(reading, pool)
        reading.plans = _compared(all_but_models, reading)
        if not run.load_state_pre_hooks:
            reading.plans = _model_plans(reading, list(run.models)) + reading.plans
        held = {file: values for plan in reading.plans for file, values in plan.holds.items()}
        report.findings[:0] = [_with_contents(found, held) for check in checks for found in check.result()]
    _exchange_findings(reading, reading.plans, strict)


def _model_plans(reading: Reading, models: list[Any]) -> list[Restoration]:
    form, source, run = reading.format, reading.source, reading.run
    plans = _compared(lambda _: form.model_restorations(run, models, source), reading)
    if reading.part != selection.ADAPTERS:
        return plans
    return [selection.fitting(plan, model) for plan, model in zip(plans, models, strict=True)]


def _compared(look: Callable[[Exchange], list[Restoration]], reading: Reading) -> list[Restoration]:
    """Compare on every rank; if it fails on one, all raise the same error."""
    with reading.ranks.together("Comparing a checkpoint with the run") as exchange:
        plans = look(exchange)
    return plans


def _begin_checks(reading: Reading, pool: ThreadPoolExecutor) -> list[Future[list[Finding]]]:
    """Begin to compare files with the manifest: what a machine's ranks read, each file on one of them."""
    source, world = reading.source, reading.run.world
    manifest = source.manifest
    if manifest is None:
        return []
    machine = _machine(world)
    read = reading.read_by(*machine)
    # So that ranks get about as many bytes.
    by_size = sorted((entry for entry in manifest.entries if entry.name in read), key=lambda entry: -entry.size)
    compared = [*(entry.name for entry in by_size), *manifest.lost]
    mine = [name for number, name in enumerate(compared) if number % len(machine) == world.local_rank]
    return [pool.submit(_damage, manifest, source.folder, name, world.rank) for name in mine]


def _damage(manifest: Manifest, folder: Path, name: str, rank: int) -> list[Finding]:
    try:
        details = manifest.damages(folder, [name]).values()
    except UnsafeCheckpointError as error:
        return [Finding(name, "unsafe", str(error), rank)]
    return [Finding(name, "damaged", f"{folder / name} {detail}", rank) for detail in details]


def _with_contents(finding: Finding, held: dict[str, list[str]]) -> Finding:
    """Return what is wrong with a file, and what of a component lies in it."""
    if finding.component not in held:
        return finding
    return replace(finding, detail=f"{finding.detail}; it holds {listed(held[finding.component])}")


def _exchange_findings(reading: Reading, plans: list[Restoration], strict: bool) -> None:
    """Share the findings of all ranks; all raise the same error if the findings forbid a restore."""
    own = [*reading.report.findings, *(found for plan in plans for found in plan.findings)]
    everywhere = reading.ranks.exchange(own)
    reading.report.findings = list(dict.fromkeys(found for findings in everywhere for found in findings))
    error = reading.report.error() if strict else None
    if error is not None:
        raise error


def _call_hooks(reading: Reading, strict: bool) -> list[Restoration]:
    """Let load hooks do their part, and compare the models that they left to be loaded."""
    run, ranks, folder = reading.run, reading.ranks, str(reading.source.folder)
    models = models_for_hooks(run)
    prepared = dict(zip(map(id, models), run.models, strict=True))
    doing = f"Calling the load hooks for the checkpoint {folder!r}"
    with ranks.together(doing, "What they loaded stays; start the run again."):
        for hook in list(run.load_state_pre_hooks.values()):
            hook(models, folder)
    late = _model_plans(reading, [prepared.get(id(model), model) for model in models])
    _exchange_findings(reading, late, strict)
    return late


def _apply(reading: Reading) -> None:
    """Restore what fits on all ranks alike."""
    report = reading.report
    bad = {found.component for found in report.findings if found.kind != "extra"}
    lost = {found.component for found in report.findings if found.kind in ("damaged", "unsafe")}
    doing = f"Restoring from {str(report.folder)!r}, whose parts had been found to fit,"
    with reading.ranks.together(doing, "The run is restored in part only; start it again."):
        for plan in reading.plans:
            if plan.component not in bad and not plan.files & lost:
                _restore(plan, report, report.restored)
            elif plan.partial and plan.component not in lost and not plan.files & lost:
                _restore(plan, report, report.partial)


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


def _log(report: RestoreReport, run: Run) -> None:
    if report.findings:
        logger.warning("Not everything in the checkpoint %s was restored:\n%s", report.folder, report)
    if report.absent and report.reseeded and run.world.is_main:
        logger.warning(
            "The checkpoint %s has no random states of its step from %s, whose generators are seeded anew: it was "
            "saved by the main process alone.",
            report.folder,
            ranks_text(report.reseeded),
        )


@record
class Reading:
    """The checkpoint that all ranks load, as it is compared with the run."""

    run: Run
    ranks: Ranks
    storage: Storage
    source: Source
    format: CheckpointFormat  # how models and optimizers lie in it
    report: RestoreReport
    part: str | None  # which part of a run it is, `None` for all of it
    plans: list[Restoration] = field(default_factory=list)  # how what was compared is restored

    def read_by(self, *ranks: int) -> set[str]:
        """Return the names that ranks read, without the random states of other ranks."""
        found = set[str]()
        for rank in ranks:
            own = {
                names.random_states_name(each % self.source.world_size)
                for each in (rank, first_tensor_parallel_rank(rank))
            }
            if self.report.absent:
                own.add(names.random_states_name(0))  # from which those of a rank without any are derived
            read = self.format.files_of(self.source, rank, self.run.world.size)
            found |= {name for name in read if name in own or not name.startswith(names.RNG_STATE_NAME)}
        return found
