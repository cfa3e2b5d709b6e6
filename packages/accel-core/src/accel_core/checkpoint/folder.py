"""Saving the state of a run into a folder, and restoring it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_core.checkpoint import background, deferred_delete, progress, stateful
from accel_core.checkpoint.agreement import together
from accel_core.checkpoint.format import Exchange, Part, Run
from accel_core.checkpoint.places import saved_to
from accel_core.checkpoint.plain import PlainFormat
from accel_core.checkpoint.ranks import Ranks, described
from accel_core.checkpoint.reading import Reading, examine, model_plans, read_and_compare, share
from accel_core.checkpoint.report import Restoration, RestoreReport
from accel_core.checkpoint.staging import Buffers
from accel_core.checkpoint.transaction import Transaction
from accel_core.comm import roll_call
from accel_core.comm.disagreement import listed_failures, ranks_text
from accel_core.errors import CheckpointDamagedError, CheckpointError, RankDisagreementError
from accel_core.mesh.tensor import is_spread
from accel_core.modules.unwrap import extract_model_from_parallel
from accel_core.process.world import World

__all__ = ["load_state", "placement", "save_state"]

logger = logging.getLogger(__name__)

_buffers = Buffers()


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
    new checkpoint. Where each rank holds whole models and optimizers, rank 0 may also call it alone while the others go
    on: their random states are then not in the checkpoint.

    Raises:
        CheckpointError: Writing failed on some rank; every rank raises the same, and it says which checkpoint stands.
        ConfigurationError: No folder was given, or the automatic name is taken.
        RankDisagreementError: Only some ranks called it, and those cannot save without the others.
        RemoteRankError: A rank neither called it nor went on before the process group's timeout.
    """
    background.finish()
    absent = _absent(run)
    world = replace(run.world, size=1) if absent else run.world
    ranks = Ranks(world, "save_state")
    automatic = run.project.automatic_checkpoint_naming
    given = Path()
    with together(ranks, "Preparing a checkpoint") as exchange:
        if automatic:
            # A rank that was absent from a save did not count it.
            run.project.iteration = max(exchange(run.project.iteration))
        given = saved_to(run, output_dir)
    if run.world.is_main:
        logger.info("Saving current state to %s", given)
    transaction = Transaction.begin(
        world,
        ranks,
        Path(os.path.realpath(given)),
        each_node=run.project.save_on_each_node,
        limit=run.project.total_limit if automatic else None,
        numbered=automatic,
        absent=absent,
    )
    parts: list[Part] = []
    doing = f"Collecting the state for the checkpoint {str(given)!r}"
    try:
        with together(ranks, doing):
            weights = run.strategy.format.weights(run)
            for hook in list(run.save_state_pre_hooks.values()):
                hook(_models_for_hooks(run), weights, str(transaction.staging))
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
    own = ranks if absent else background.own_ranks(run.world)
    run.project.iteration += 1

    def write() -> None:
        transaction.finish(parts, hooked, own)
        # Here, and not where the next save begins: that would keep the run waiting.
        deferred_delete.wait()

    return background.start(write, given)


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
        share(report, late, ranks, strict=strict)
        plans = late + plans
    _apply(plans, reading, ranks)
    _tell(report, run)
    _count_on(run, reading.opened.target)
    return report


def _absent(run: Run) -> int:
    """Return how many ranks a save is made without: none, or all but the main one, which has all that is saved.

    Raises:
        RankDisagreementError: Only some ranks called it, and those cannot save without the others.
    """
    absent = roll_call.call(run.world, "save_state")
    if not absent:
        return 0
    by_one = _one_rank_holds_all(run)
    if by_one and run.world.is_main and len(absent) == run.world.size - 1:
        return len(absent)
    if set(absent.values()) == {roll_call.ELSEWHERE}:
        # The others wait in a frame: met there, all ranks learn where the others are.
        Ranks(run.world, "save_state").exchange(None)
    here = [rank for rank in range(run.world.size) if rank not in absent]
    why = "all ranks or rank 0 alone" if by_one else "all ranks, as each holds a part of what is saved"
    raise RankDisagreementError(
        f"save_state is called by {why}; got {ranks_text(here)} there, and not "
        f"{'; '.join(listed_failures(absent))}. Call it on every rank, outside of any `if` on the rank."
    )


def _one_rank_holds_all(run: Run) -> bool:
    """Return whether one rank can write the whole checkpoint without asking another one."""
    parameters = (value for model in run.models for value in (*model.parameters(), *model.buffers()))
    return type(run.strategy.format) is PlainFormat and not any(map(is_spread, parameters))


def _load_after_hooks(run: Run, hooks: list[Callable[..., None]], reading: Reading, ranks: Ranks) -> list[Restoration]:
    """Let load hooks do their part, and compare the models that they left to be loaded."""
    models = _models_for_hooks(run)
    prepared = dict(zip(map(id, models), run.models, strict=True))
    doing = f"Calling the load hooks for the checkpoint {str(reading.source.folder)!r}"
    with together(ranks, doing, "What they loaded stays; start the run again."):
        for hook in hooks:
            hook(models, str(reading.source.folder))
    left = [prepared.get(id(model), model) for model in models]
    late = examine(lambda: model_plans(run, left, reading), ranks)
    if any(ranks.exchange(reading.opened.replaced())):
        raise CheckpointError(
            f"The checkpoint {str(reading.source.folder)!r} was replaced while load hooks read it; got another save "
            "there. Start the run again: what the hooks loaded may be of two saves."
        )
    return late


def _models_for_hooks(run: Run) -> list[Any]:
    """Return the models as Accelerate's hooks know them: whole ones as they were before `prepare` wrapped them."""
    if type(run.strategy.format) is not PlainFormat:
        return list(run.models)
    return [extract_model_from_parallel(model, keep_torch_compile=False) for model in run.models]


def _count_on(run: Run, target: Path) -> None:
    """Continue automatic numbering after the loaded checkpoint, wherever a crash left its files."""
    number = target.name.rpartition("_")[2]
    if run.project.automatic_checkpoint_naming and number.isdecimal():
        run.project.iteration = max(run.project.iteration, int(number) + 1)


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


def _parts(run: Run, exchange: Exchange, writes: bool, weights: list[dict[str, Any]], **kwargs: Any) -> list[Part]:
    """Return what this rank writes."""
    parts = run.strategy.format.parts(run, weights, writes=writes, exchange=exchange, **kwargs)
    if writes:
        parts += [*stateful.parts(run), progress.part(run)]
    return [*parts, progress.random_part(run)]


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
        if reading.opened.altered():
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
