"""Saving the state of a run into a folder: what is written, in which order, and what a crash leaves.

1. `_absent`: all ranks come, or rank 0 alone where it holds everything.
2. `Transaction.begin`: what earlier saves left is recovered, and a hidden folder is made. A crash leaves that folder,
   which the next save deletes; so it is up to the end of 5.
3. Save hooks are called; then each part of the run says what it writes (`Part`), and is copied for a background save.
4. `Transaction.finish`: every rank writes and flushes its files, and tells the others their digests.
5. One rank of each disk writes what all ranks share (`SharedPart.conclude`) and, last, the manifest.
6. `commit.publish`: one rename makes it the checkpoint. A crash before it leaves the earlier one, a crash after it the
   new one, whatever of it has come to its place.
7. Checkpoints beyond `total_limit` are deleted, the oldest first.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from accel_core._records import record
from accel_core.checkpoint import background, commit, deferred_delete, names, progress, stateful
from accel_core.checkpoint.agreement import common_save, together
from accel_core.checkpoint.digest import digest_of
from accel_core.checkpoint.format import Part, Run, SaveRequest, SharedPart
from accel_core.checkpoint.manifest import Entry, Manifest, versions
from accel_core.checkpoint.places import saved_to
from accel_core.checkpoint.plain import PlainFormat, models_for_hooks
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.staging import Buffers
from accel_core.comm import roll_call
from accel_core.comm.disagreement import listed_failures, ranks_text
from accel_core.errors import CheckpointError, ConfigurationError, RankDisagreementError, RemoteRankError
from accel_core.mesh.tensor import is_spread
from accel_core.process.world import World

__all__ = ["Transaction", "save_state"]

logger = logging.getLogger(__name__)

_KEEPER = ".keeper"
_WRITERS = 4
_SHOWN = 10
_AFTER_COMMIT = "What each rank says of its disk holds; load_state takes the newest save that every rank holds."

_buffers = Buffers()

_HARMLESS = frozenset({"exclude_frozen_parameters", "save_latest"})
"""Keywords of `save_state` that Accelerate passes on to DeepSpeed, without which a checkpoint has all that it has with
them."""


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
        ConfigurationError: No folder was given, the automatic name is taken, or a keyword that nobody reads was given.
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
        _refuse_keywords(save_model_func_kwargs)
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
                hook(models_for_hooks(run), weights, str(transaction.staging))
        hooked = transaction.written_by_hooks()
        with together(ranks, doing) as exchange:
            parts = _parts(SaveRequest(run, weights, transaction.writes_shared, exchange, safe_serialization))
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


def _refuse_keywords(given: Mapping[str, object]) -> None:
    """Refuse keywords of `save_state` that nobody reads."""
    unknown = sorted(given.keys() - _HARMLESS)
    if unknown:
        raise ConfigurationError(
            f"save_state takes output_dir, safe_serialization and blocking; got {', '.join(unknown)}, which nobody "
            "reads. Pass blocking=False to write in the background, call save_model for weights in several files, and "
            "register_for_checkpointing for objects of your own."
        )


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


def _parts(request: SaveRequest) -> list[Part]:
    """Return what this rank writes."""
    parts, run = request.run.strategy.format.parts(request), request.run
    if request.writes:
        parts += [*stateful.parts(run), progress.part(run)]
    return [*parts, progress.random_part(run)]


@record(frozen=True)
class Transaction:
    """One save, as one rank sees it.

    Attributes:
        target: Where the checkpoint goes.
        staging: Where it is written.
        identity: Id of the save.
        written_at: When it began on the main rank, in nanoseconds since the epoch; the same on all ranks.
        rank: This rank.
        size: Number of ranks.
        keeper: The rank that completes the folder on the disk that this rank sees.
        writes_shared: Whether this rank writes what all ranks of its disk share.
        limit: Number of numbered checkpoints to keep, `None` for all.
        absent: Number of ranks of the run that it is made without.
    """

    target: Path
    staging: Path
    identity: str
    written_at: int
    rank: int
    size: int
    keeper: int
    writes_shared: bool
    limit: int | None
    absent: int = 0

    @classmethod
    def begin(
        cls,
        world: World,
        ranks: Ranks,
        target: Path,
        *,
        each_node: bool,
        limit: int | None,
        numbered: bool,
        absent: int = 0,
    ) -> Transaction:
        """Settle what earlier saves left, and make the folder to write into; every rank calls it.

        Raises:
            CheckpointError: Some rank could not; every rank raises the same.
        """
        doing = f"Preparing the checkpoint {str(target)!r}"
        identity, written_at = ranks.exchange((names.fresh_id(), time.time_ns()))[0]
        several_disks = world.local_size < world.size
        kept = _common_saves(target, ranks, numbered) if several_disks else {}
        # What a crash left of other checkpoints on several disks is decided on all of them, not by one rank alone.
        others = numbered and absent < world.local_size
        with together(ranks, doing):
            if world.is_main:
                _make_room(target, identity, world.rank, numbered, kept, others=others)
        if several_disks:
            # Only now can the first rank of a machine see whether its disk is the main rank's.
            with together(ranks, doing):
                if world.is_local_main and _keeper_of(target, identity) is None:
                    _make_room(target, identity, world.rank, numbered, kept, others=others)
        staging, keeper = Path(), 0
        with together(ranks, doing):
            staging, keeper = _found(target, identity)
        return cls(
            target,
            staging,
            identity,
            written_at,
            world.rank,
            world.size,
            keeper,
            writes_shared=world.is_main or (each_node and keeper == world.rank),
            limit=limit,
            absent=absent,
        )

    def written_by_hooks(self) -> list[str]:
        """Return the names of the files that save hooks wrote; on other ranks than the keeper, none."""
        return [name for name in _files_below(self.staging) if name != _KEEPER] if self.keeper == self.rank else []

    def finish(self, parts: Sequence[Part], hooked: Sequence[str], ranks: Ranks, *, threads: bool = False) -> Path:
        """Write, agree, complete and put in place; every rank calls it and leaves when all is done.

        Raises:
            CheckpointError: Some rank failed; every rank raises the same, and it says which checkpoint stands.
        """
        try:
            entries: list[Entry] = []
            with together(ranks, f"Writing the checkpoint {str(self.target)!r}"):
                entries = self._write(parts, threads)
            shared = [part for part in parts if isinstance(part, SharedPart)]
            everybody = ranks.exchange((self.keeper, entries, {part.name: part.note for part in shared}))
            mine = [entry for keeper, written, _ in everybody if keeper == self.rank for entry in written]
            with together(ranks, f"Completing the checkpoint {str(self.target)!r}"):
                if self.keeper == self.rank:
                    for part in shared:
                        notes = [noted.get(part.name) for _, _, noted in everybody]
                        mine += part.conclude(self.staging, self.rank, notes)
                    self._complete(mine, hooked)
        except BaseException:
            self.abandon()
            raise
        self._publish(ranks, alone=len({keeper for keeper, *_ in everybody}) == 1)
        if self.limit is not None:
            if self.keeper == self.rank:
                commit.prune(self.target, self.limit)
            ranks.exchange(None)
        return self.target

    def abandon(self) -> None:
        """Delete what was written; what cannot be deleted now is a leftover for the next save."""
        if self.keeper == self.rank:
            commit.undo(self.staging, self.target)

    def _write(self, parts: Sequence[Part], threads: bool) -> list[Entry]:
        concurrent = [part for part in parts if threads and part.concurrent]
        entries: list[Entry] = []
        if concurrent:
            with ThreadPoolExecutor(max_workers=_WRITERS, thread_name_prefix="accel-checkpoint") as pool:
                for written in pool.map(lambda part: part.write(self.staging, self.rank), concurrent):
                    entries += written
        for part in parts:
            if not (threads and part.concurrent):
                entries += part.write(self.staging, self.rank)
        return entries

    def _complete(self, entries: list[Entry], hooked: Sequence[str]) -> None:
        (self.staging / _KEEPER).unlink()
        entries += [_entry_of_hook(self.staging / name, name, self.rank) for name in hooked]
        listed, found = {entry.name for entry in entries}, set(_files_below(self.staging))
        if listed != found:
            raise CheckpointError(
                f"The parts of a checkpoint have to list what they write; got {sorted(found - listed)[:_SHOWN]} that "
                f"no part lists, and {sorted(listed - found)[:_SHOWN]} that none wrote. Return an Entry for every "
                "file from Part.write."
            )
        ordered = tuple(sorted(entries, key=lambda entry: entry.name))
        manifest = Manifest(ordered, self.size, versions(), self.written_at, self.identity, self.absent)
        commit.complete(self.staging, self.target, manifest)

    def _publish(self, ranks: Ranks, *, alone: bool) -> None:
        """Commit on every disk. All of them are prepared, so what one disk commits, every disk can be given."""
        try:
            with together(ranks, f"Putting the checkpoint {str(self.target)!r} in place", _AFTER_COMMIT):
                if self.keeper == self.rank:
                    commit.publish(self.staging, self.target)
        except RemoteRankError as error:
            raise RemoteRankError(
                f"Rank {self.rank} lost another rank while the checkpoint {str(self.target)!r} was put in place, which "
                f"may or may not have been done; got {error.__cause__ or error}. Start the run again: load_state "
                "takes the newest save that every rank holds."
            ) from error
        except CheckpointError:
            # Where several disks commit, another may have: then what is prepared here is what this disk is brought
            # up to date from.
            if alone and self.keeper == self.rank and self.staging.is_dir():
                self.abandon()
            raise


def _make_room(target: Path, identity: str, rank: int, numbered: bool, kept: dict[str, str], *, others: bool) -> None:
    for other in commit.unrecovered(target.parent) if others else []:
        commit.recover(other, kept.get(other.name))
    commit.recover(target, kept.get(target.name))
    if numbered and commit.find(target) is not None:
        raise ConfigurationError(
            f"The checkpoint {str(target)!r} exists already, and automatic naming would overwrite it. Load it "
            "first, which sets the number of the next one, or set project_configuration.iteration."
        )
    deferred_delete.wait()
    staging = commit.stage(target, identity)
    (staging / _KEEPER).write_text(str(rank))


def _found(target: Path, identity: str) -> tuple[Path, int]:
    """Return the folder that was made for a save on the disk that this rank sees, and which rank completes it."""
    staging, keeper = commit.staging_of(target, identity), _keeper_of(target, identity)
    if staging is None or keeper is None:
        raise CheckpointError(
            f"The folder that the main process made for a save is not to be seen beside or in {str(target)!r}; got "
            "none. Pass the same folder on all ranks of a machine."
        )
    return staging, keeper


def _keeper_of(target: Path, identity: str) -> int | None:
    staging = commit.staging_of(target, identity)
    try:
        return None if staging is None else int((staging / _KEEPER).read_text())
    except FileNotFoundError:
        return None


def _common_saves(target: Path, ranks: Ranks, numbered: bool) -> dict[str, str]:
    """Return which save all disks hold of each target that a crash left several of; no id where there is none."""
    unsettled = {other.name for other in commit.unrecovered(target.parent)} if numbered else set()
    looked_at = sorted(set().union({target.name}, *ranks.exchange(unsettled)))
    own = [commit.saves_of(target.with_name(name)) for name in looked_at]
    everywhere = ranks.exchange(own)
    return {name: common_save(held) or "" for name, held in zip(looked_at, zip(*everywhere, strict=True), strict=True)}


def _files_below(folder: Path) -> list[str]:
    """Return the files in a folder and in all folders in it, but no links."""
    paths = (Path(place) / name for place, _, files in os.walk(folder) for name in files)
    return [path.relative_to(folder).as_posix() for path in paths if not path.is_symlink()]


def _entry_of_hook(path: Path, relative: str, rank: int) -> Entry:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.fsync(descriptor)
    size = os.fstat(descriptor).st_size
    return Entry(relative, size, digest_of(path, lambda _: descriptor), rank)
