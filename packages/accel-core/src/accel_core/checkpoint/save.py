"""Saving the state of a run into a folder: what is written, in which order, and what a crash leaves.

1. `_absent`: all ranks come, or rank 0 alone where it holds everything.
2. `Transaction.begin`: what earlier saves left is recovered, and a hidden folder is made. A crash leaves that folder,
   which the next save deletes; so it is up to the end of 5.
3. Save hooks are called; then each part of the run says what it writes (`Part`), and is copied for a background save.
4. `Transaction.finish`: every rank writes and flushes its files, and tells the others their digests. Many ranks write
   these into lists of their own instead, and sums over all ranks show whether every file is there (`lists`).
5. One rank of each disk writes what all ranks share (`SharedPart.conclude`) and, last, the manifest.
6. `commit.publish`: one rename makes it the checkpoint. A crash before it leaves the earlier one, a crash after it the
   new one, whatever of it has come to its place.
7. Checkpoints beyond `total_limit` are deleted, the oldest first.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_core._records import record
from accel_core.checkpoint import background, commit, deferred_delete, lists, names, selection, stateful
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.agreement import common_saves
from accel_core.checkpoint.digest import digest_of, flush
from accel_core.checkpoint.format import Part, Run, SaveRequest, SharedPart
from accel_core.checkpoint.manifest import Entry, Manifest, total_of, versions
from accel_core.checkpoint.plain import PlainFormat, models_for_hooks
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.remote.upload import Upload, open_store, probe
from accel_core.checkpoint.staging import Buffers
from accel_core.comm import roll_call
from accel_core.comm.disagreement import listed_failures, ranks_text
from accel_core.comm.transport import BACKGROUND
from accel_core.errors import CheckpointError, ConfigurationError, RankDisagreementError, RemoteRankError
from accel_core.host.run_card import card
from accel_core.mesh.tensor import is_spread
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process.world import World

__all__ = ["Transaction", "check_project", "save_state"]

logger = logging.getLogger(__name__)

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
    parts: Iterable[str] | None = None,
    **save_model_func_kwargs: object,
) -> Path | background.Handle:
    """Save everything that a run needs to go on, in one step, with the errors that `Accelerator.save_state` lists.

    Every rank calls it, and leaves it when the checkpoint is complete. A kill at any instant leaves the previous or the
    new checkpoint. Where each rank holds whole models and optimizers, rank 0 may also call it alone while the others go
    on: their random states are then not in the checkpoint.
    """
    background.finish()
    absent = _absent(run)
    world = replace(run.world, size=1) if absent else run.world
    ranks = Ranks(world, "save_state")
    with ranks.together("Preparing a checkpoint") as exchange:
        _refuse_keywords(save_model_func_kwargs)
        part = selection.chosen(parts, run, output_dir)
        told = exchange((part, run.project.iteration))
        selection.refuse_difference([each for each, _ in told])
        run = run if part is None else selection.without_the_rest(run)
        if run.project.automatic_checkpoint_naming:
            # A rank that was absent from a save did not count it.
            run.project.iteration = max(number for _, number in told)
        given = _target(run.project, output_dir)
    if run.world.is_main:
        logger.info("Saving current state to %s", given)
    target = given if isinstance(given, Address) else Path(os.path.realpath(given))
    transaction = Transaction.begin(world, ranks, target, run.project, absent)
    doing = f"Collecting the state for the checkpoint {str(given)!r}"
    try:
        with ranks.together(doing):
            weights = run.strategy.format.weights(run)
            for hook in list(run.save_state_pre_hooks.values()):
                hook(models_for_hooks(run), weights, str(transaction.staging))
        with ranks.together(doing) as exchange:
            hooked = transaction.written_by_hooks()
            kept = selection.kept_of(part, run)
            weights = selection.restricted(kept, weights)
            request = SaveRequest(run, weights, transaction.writes_shared, exchange, safe_serialization, kept)
            pieces = run.strategy.format.parts(request)
            if request.writes:
                rest = [*stateful.parts(run), stateful.counters_part(run)]
                pieces += rest if part is None else [selection.part(part)]
            pieces += [stateful.random_part(run)] if part is None else []
            if not blocking:
                _buffers.begin()
                pieces = [each.snapshot(_buffers) for each in pieces]
                _buffers.end()
    except BaseException:
        transaction.abandon()
        raise
    # In the background over a gloo group of its own, so that the save does not disturb the collectives of training.
    own = ranks if blocking or absent else Ranks(run.world, "save_state in the background", group_name=BACKGROUND)

    def write() -> None:
        transaction.finish(pieces, hooked, own, threads=blocking)
        card.checkpoint(str(given))
        if not blocking:
            # Here, and not where the next save begins: that would keep the run waiting.
            deferred_delete.wait()

    if blocking:
        write()
        run.project.iteration += 1
        return given
    run.project.iteration += 1
    return background.start(write, given)


def check_project(run: Run) -> None:
    """Make sure that checkpoints can be kept at the address of a project, where it has one; every rank calls it."""
    folder = names.folder_of(run.project.checkpoints_folder())
    if isinstance(folder, Address) and run.project.automatic_checkpoint_naming:
        ranks = Ranks(run.world, "Accelerator")
        with ranks.together(f"Looking at the address of the project, {str(run.project.project_dir)!r},"):
            store = open_store(folder / "checkpoint_0", ranks)
            if run.world.is_local_main:
                probe(store)


def _target(project: ProjectConfiguration, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder to save into."""
    if project.automatic_checkpoint_naming:
        return names.folder_of(project.checkpoints_folder()) / f"checkpoint_{project.iteration}"
    if output_dir is None:
        raise ConfigurationError(
            "save_state was not given a folder; output_dir is None and automatic naming is off. Pass a folder, or use "
            "ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return names.folder_of(output_dir)


def _refuse_keywords(given: Mapping[str, object]) -> None:
    """Refuse keywords of `save_state` that nobody reads."""
    unknown = sorted(given.keys() - _HARMLESS)
    if unknown:
        raise ConfigurationError(
            f"save_state takes output_dir, safe_serialization, blocking and parts; got {', '.join(unknown)}, which has "
            "no effect. Pass blocking=False to write in the background, call save_model for weights in several files, "
            "and register_for_checkpointing for objects of your own."
        )


def _absent(run: Run) -> int:
    """Return how many ranks a save is made without: none, or all but the main one, which has all that is saved."""
    parameters = (value for model in run.models for value in (*model.parameters(), *model.buffers()))
    by_one = type(run.strategy.format) is PlainFormat and not any(map(is_spread, parameters))
    absent = roll_call.call(run.world, "save_state")
    if not absent or (by_one and run.world.is_main and len(absent) == run.world.size - 1):
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


@record(frozen=True)
class Transaction:
    """One save, as one rank sees it."""

    world: World
    target: Path
    staging: Path
    identity: str
    written_at: int  # when it began on the main rank, in nanoseconds since the epoch; the same on all ranks
    committer: int  # the rank that completes the folder on the disk that this rank sees
    writes_shared: bool  # whether this rank writes what all ranks of its disk share
    limit: int | None  # number of numbered checkpoints to keep, `None` for all
    absent: int  # number of ranks of the run that it is made without
    upload: Upload | None = None  # what goes on where the target is an address in a store

    @classmethod
    def begin(cls, world: World, ranks: Ranks, target: Path, project: ProjectConfiguration, absent: int) -> Transaction:
        """Recover what earlier saves left, and make the folder to write into; every rank calls it."""
        doing = f"Preparing the checkpoint {str(target)!r}"
        numbered = project.automatic_checkpoint_naming
        limit = project.total_limit if numbered else None
        if isinstance(target, Address):
            up = Upload.begin(world, ranks, target, project)
            at = up.identity, up.written_at
            return cls(world, target, up.local.files, *at, 0, world.is_main, limit, absent, up)
        identity, written_at = ranks.broadcast((names.fresh_id(), time.time_ns()))
        several_disks = world.local_size < world.size
        kept = common_saves(target, ranks, numbered) if several_disks else {}
        # What a crash left of other checkpoints on several disks is decided on all of them, not by one rank alone.
        others = numbered and absent < world.local_size
        # Only after the main rank can the first rank of a machine see whether its disk is the main rank's.
        for makes in (world.is_main, world.is_local_main)[: 1 + several_disks]:
            with ranks.together(doing):
                if makes and commit.staged(target, identity) is None:
                    commit.make_room(target, identity, world.rank, kept, numbered=numbered, others=others)
        with ranks.together(doing):
            found = commit.staged(target, identity)
            if found is None:
                raise CheckpointError(
                    "The folder that the main process made for a save is not to be seen beside or in "
                    f"{str(target)!r}; got none. Pass the same folder on all ranks of a machine."
                )
            staging, committer = found
        shared = world.is_main or (project.save_on_each_node and committer == world.rank)
        return cls(world, target, staging, identity, written_at, committer, shared, limit, absent)

    @property
    def completes(self) -> bool:
        """Whether this rank completes the folder on its disk."""
        return self.committer == self.world.rank

    def written_by_hooks(self) -> list[str]:
        """Return the names of the files that save hooks wrote; on other ranks than the committer, none."""
        if self.upload is not None:
            return self.upload.note_hooked()
        return commit.files_in(self.staging) if self.completes else []

    def finish(self, parts: Sequence[Part], hooked: Sequence[str], ranks: Ranks, *, threads: bool = False) -> Path:
        """Write, agree, complete and put in place; every rank calls it and leaves when all is done."""
        try:
            room = self.upload.local.room() if self.upload else nullcontext()
            with ranks.together(f"Writing the checkpoint {str(self.target)!r}"), room:
                entries = self._write(parts, threads, listed=ranks.many)
            alone = (self._agree_by_lists if ranks.many else self._agree)(entries, parts, hooked, ranks)
        except BaseException:
            self.abandon()
            raise
        self._publish(ranks, alone=alone)
        if self.limit is not None:
            if self.completes:
                self.upload.prune(self.limit) if self.upload else commit.prune(self.target, self.limit)
            # No rank leaves while an old checkpoint is half deleted.
            ranks.exchange(None)
        return self.target

    def abandon(self) -> None:
        """Delete what was written; what cannot be deleted now is a leftover for the next save."""
        if self.upload is not None:
            self.upload.abandon()
        elif self.completes:
            commit.undo(self.staging, self.target)

    def _write(self, parts: Sequence[Part], threads: bool, listed: bool) -> list[Entry]:
        """Write the files of this rank, and its list where it has one."""
        concurrent = [part for part in parts if threads and part.concurrent]
        entries: list[Entry] = []
        if concurrent:  # threads copy on streams of their own, which do not wait for what this one's computes
            self.world.hardware.synchronize()
        with ThreadPoolExecutor(max_workers=_WRITERS, thread_name_prefix="accel-checkpoint") as pool:
            for written in pool.map(lambda part: part.write(self.staging, self.world.rank), concurrent):
                entries += written
        for part in parts:
            if not (threads and part.concurrent):
                entries += part.write(self.staging, self.world.rank)
        entries += self._entries_of(self.upload.hooked) if self.upload else []
        if listed and entries and not self.completes:
            entries.append(lists.write(self.staging, self._manifest(entries, {}), self.world.rank))
        if self.upload:
            self.upload.send(entries)
        return entries

    def _entries_of(self, hooked: Iterable[str]) -> list[Entry]:
        """Return the entries of files that hooks wrote, after flushing them to disk."""
        for name in hooked:
            flush(self.staging / name)
        places = ((name, self.staging / name) for name in hooked)
        return [Entry(name, path.stat().st_size, digest_of(path), self.world.rank) for name, path in places]

    def _manifest(self, entries: Sequence[Entry], installed: dict[str, str], **of_lists: Any) -> Manifest:
        ordered = tuple(sorted(entries, key=lambda entry: entry.name))
        of_save = self.world.size, installed, self.written_at, self.identity, self.absent
        return Manifest(ordered, *of_save, **of_lists)

    def _agree(self, entries: list[Entry], parts: Sequence[Part], hooked: Sequence[str], ranks: Ranks) -> bool:
        """Tell all ranks of all files, and complete every disk; return whether there is only one."""
        shared = [part for part in parts if isinstance(part, SharedPart)]
        everybody = ranks.exchange((self.committer, entries, {part.name: part.note for part in shared}))
        mine = [entry for committer, written, _ in everybody if committer == self.world.rank for entry in written]
        with ranks.together(self._completing):
            if self.completes:
                mine += self._concluded(shared, [noted for *_, noted in everybody]) + self._entries_of(hooked)
                self._refuse_difference(mine, self._found(mine))
                self._complete(self._manifest(mine, versions()))
        return len({committer for committer, *_ in everybody}) == 1

    def _agree_by_lists(self, entries: list[Entry], parts: Sequence[Part], hooked: Sequence[str], ranks: Ranks) -> bool:
        """Do the same, and let every rank but those that complete a disk list its own files."""
        shared = [part for part in parts if isinstance(part, SharedPart)]
        noted = {part.name: part.note for part in shared}
        notes = lists.notes_of_all(ranks, noted, self.identity, self.completes) if shared else []
        found: dict[str, int] | None = None
        with ranks.together(self._completing):
            if self.completes:
                entries += self._concluded(shared, notes) + self._entries_of(hooked)
                found = self._found(entries)
        disks, fits = lists.compare(ranks, entries, found)
        everybody = [] if fits else ranks.exchange((self.committer, entries))
        with ranks.together(self._completing):
            if found is not None:
                if not fits:
                    all_ = [each for committer, own in everybody if committer == self.world.rank for each in own]
                    found = self._found(all_)
                    self._refuse_difference(all_, found)
                total = f"{total_of(found.items()):x}"
                self._complete(self._manifest(entries, versions(), lists=lists.ranges(found), total=total))
        return disks == 1

    @property
    def _completing(self) -> str:
        return f"Completing the checkpoint {str(self.target)!r}"

    def _concluded(self, shared: Sequence[SharedPart], notes: Sequence[Mapping[str, object]]) -> list[Entry]:
        """Write what can only be written when all ranks have written theirs."""
        told = {part.name: [each.get(part.name) for each in notes] for part in shared}
        return [each for part in shared for each in part.conclude(self.staging, self.world.rank, told[part.name])]

    def _found(self, entries: Sequence[Entry]) -> dict[str, int]:
        """Return the names and sizes of all files that lie there."""
        return self.upload.found(entries) if self.upload else commit.sizes_in(self.staging)

    def _refuse_difference(self, entries: Sequence[Entry], found: Mapping[str, int]) -> None:
        listed, there = {entry.name for entry in entries}, found.keys()
        if listed != there:
            raise CheckpointError(
                f"The parts of a checkpoint have to list what they write; got {sorted(there - listed)[:_SHOWN]} that "
                f"no part lists, and {sorted(listed - there)[:_SHOWN]} that none wrote. Return an Entry for every file "
                "from Part.write."
            )

    def _complete(self, manifest: Manifest) -> None:
        if self.upload is None and commit.staged(self.target, self.identity) is None:  # what is there, parts made anew
            raise CheckpointError(
                f"The folder that a save to {str(self.target)!r} was written into is gone; got one that another save "
                "to the same place, or a hook, cleared away. What stood there stands. Let one run at a time save there."
            )
        self.upload.complete(manifest) if self.upload else commit.complete(self.staging, self.target, manifest)

    def _publish(self, ranks: Ranks, *, alone: bool) -> None:
        """Commit on every disk. All of them are prepared, so what one disk commits, every disk can be given."""
        try:
            with ranks.together(f"Putting the checkpoint {str(self.target)!r} in place", _AFTER_COMMIT):
                if self.completes:
                    self.upload.publish() if self.upload else commit.publish(self.staging, self.target)
        except RemoteRankError as error:
            raise RemoteRankError(
                f"Rank {self.world.rank} lost another rank while the checkpoint {str(self.target)!r} was put in place, "
                f"which may or may not have been done; got {error.__cause__ or error}. Start the run again: load_state "
                "takes the newest save that every rank holds."
            ) from error
        except CheckpointError:
            # Where several disks commit, another may have: then what is prepared here is what this disk is brought
            # up to date from.
            if alone and self.completes and self.staging.is_dir():
                self.abandon()
            raise
        if self.upload is not None:
            self.upload.leave(committed=True)
