"""Saving the state of a run: what is written, in which order, and what a crash leaves.

1. `arrive`: every rank comes. Scripts written for Accelerate may save copies on the main rank alone, see `_alone`.
2. `Storage.begin`: what earlier saves left is recovered, and a hidden folder is made. A crash leaves that folder, which
   the next save deletes; so it is up to the end of 5.
3. Save hooks are called; then each part of the run says what it writes (`Part`), and is copied for a background save.
4. Every rank writes and flushes its files, and a list of them. The ranks tell one another whether they succeeded.
5. The rank that leads writes what all ranks share (`SharedPart.conclude`) and, last, the manifest.
6. `Storage.commit`: one step makes it the checkpoint. A crash before it leaves the earlier one, a crash after it the
   new one, whatever of it has come to its place.
7. Checkpoints beyond `total_limit` are deleted, the oldest first.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from accel_core._records import record
from accel_core.checkpoint import background, names, selection, stateful
from accel_core.checkpoint.address import Address
from accel_core.checkpoint.digest import digest_of, digest_of_bytes, flush
from accel_core.checkpoint.format import Part, Run, SaveRequest, SharedPart
from accel_core.checkpoint.manifest import Entry, Manifest, content_of, versions
from accel_core.checkpoint.plain import PlainFormat, models_for_hooks
from accel_core.checkpoint.ranks import Ranks
from accel_core.checkpoint.remote.storage import RemoteStorage, probe
from accel_core.checkpoint.staging import Buffers
from accel_core.checkpoint.storage import Storage, place_of, storage_of
from accel_core.comm.arrival import arrive
from accel_core.comm.transport import BACKGROUND
from accel_core.errors import CheckpointError, ConfigurationError, undone_by
from accel_core.host.run_card import card
from accel_core.mesh.tensor import is_spread
from accel_core.plugins.project import ProjectConfiguration

logger = logging.getLogger(__name__)

_SHOWN = 10
_AFTER_COMMIT = "Remove the cause and save again; load_state takes what is complete."
_ARRIVAL = 60.0
"""Seconds within which ranks come to a save."""

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
    timeout: float = _ARRIVAL,
    **save_model_func_kwargs: object,
) -> Path | background.Handle:
    """Save everything that a run needs to go on, in one step, with the errors that `Accelerator.save_state` lists.

    Every rank calls it, and leaves it when the checkpoint is complete. A kill at any instant leaves the previous or the
    new checkpoint.
    """
    background.finish()
    alone = _alone(run, output_dir)
    if not alone:
        arrive(run.world, "save_state", timeout)
    world = replace(run.world, size=1) if alone else run.world
    asked = None if parts is None else [parts] if isinstance(parts, str) else list(parts)
    # Ranks that save different parts are in different operations, which is an error on all of them.
    ranks = Ranks(world, "save_state" if asked is None else f"save_state(parts={asked})")
    with ranks.together("Preparing a checkpoint"):
        _refuse_keywords(save_model_func_kwargs)
        part = selection.chosen(asked, run)
        run = run if part is None else selection.without_the_rest(run)
        given, numbered = _target(run.project, output_dir), run.project.automatic_checkpoint_naming
        identity, written_at = _progress(run) if alone else names.fresh_id(), time.time_ns()
    if alone and not run.world.is_main:
        return _save_random_states(run, given, identity)
    identity, written_at = ranks.broadcast((identity, written_at))
    if run.world.is_main:
        logger.info("Saving current state to %s", given)
    storage = storage_of(given, world, run.project)
    storage.begin(ranks, identity, numbered=numbered)
    transaction = Transaction(run, storage, identity, written_at, numbered=numbered, alone=alone)
    doing = f"Collecting the state for the checkpoint {str(given)!r}"
    with undone_by(storage.abort):
        with ranks.together(doing):
            weights = run.strategy.format.weights(run)
            for hook in list(run.save_state_pre_hooks.values()):
                hook(models_for_hooks(run), weights, str(storage.staging))
        with ranks.together(doing) as exchange:
            hooked = storage.hooked()
            kept = selection.kept_of(part, run)
            weights = selection.restricted(kept, weights)
            request = SaveRequest(run, weights, storage.leads, exchange, safe_serialization, kept)
            pieces = run.strategy.format.parts(request)
            if request.writes:
                rest = [*stateful.parts(run), stateful.counters_part(run)]
                pieces += rest if part is None else [selection.part(part)]
            pieces += [stateful.random_part(run)] if part is None else []
            if not blocking:
                _buffers.begin()
                pieces = [each.snapshot(_buffers) for each in pieces]
                _buffers.end()
    # In the background over a gloo group of its own, so that the save does not disturb the collectives of training.
    own = ranks if blocking or alone else Ranks(run.world, "save_state in the background", group_name=BACKGROUND)

    def write() -> None:
        transaction.finish(pieces, hooked, own)
        card.checkpoint(str(given))

    if blocking:
        write()
    run.project.iteration += 1
    return given if blocking else background.start(write, given)


def check_project(run: Run) -> None:
    """Make sure that checkpoints can be kept at the address of a project, where it has one; every rank calls it."""
    folder = names.folder_of(run.project.checkpoints_folder())
    if isinstance(folder, Address) and run.project.automatic_checkpoint_naming:
        ranks = Ranks(run.world, "Accelerator")
        with ranks.together(f"Looking at the address of the project, {str(run.project.project_dir)!r},"):
            storage = RemoteStorage(run.world, Address(folder / "checkpoint_0"))
            if run.world.is_local_main:
                probe(storage.store)


def _target(project: ProjectConfiguration, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder to save into."""
    series = project.automatic_checkpoint_naming
    place = place_of(None if series else output_dir, project, "save_state", "output_dir")
    return place / f"checkpoint_{project.iteration}" if series else place


def _refuse_keywords(given: Mapping[str, object]) -> None:
    """Refuse keywords of `save_state` that nobody reads."""
    unknown = sorted(given.keys() - _HARMLESS)
    if unknown:
        raise ConfigurationError(
            f"save_state takes output_dir, safe_serialization, blocking, parts and timeout; got {', '.join(unknown)}, "
            "which has no effect. Pass blocking=False to write in the background, call save_model for weights in "
            "several files, and register_for_checkpointing for objects of your own."
        )


def _alone(run: Run, output_dir: str | os.PathLike[str] | None) -> bool:
    """Return whether the main rank saves without the others, as scripts written for Accelerate expect.

    They often save inside `if accelerator.is_main_process`. Where each rank holds all that is saved, the main one needs
    nobody; so there is no meeting, whether the others call `save_state` too or not.
    """
    if ProjectConfiguration.meets() or run.world.size == 1 or run.project.save_on_each_node:
        return False
    if "://" in str(output_dir or run.project.project_dir or ""):
        return False
    values = (value for model in run.models for value in (*model.parameters(), *model.buffers()))
    return type(run.strategy.format) is PlainFormat and not any(map(is_spread, values))


def _progress(run: Run) -> str:
    """Return an id that ranks with copies give a save without a meeting: the same at the same step of training only."""
    cursors = [getattr(loader, "cursor", None) for loader in run.dataloaders]
    places = [(getattr(each, "epoch", 0), getattr(each, "offset", 0)) for each in cursors]
    weights = [each.detach().flatten()[:1].double() for model in run.models for each in model.parameters()]
    numbers = torch.cat([each.cpu() for each in weights]).tolist() if weights else []
    return names.id_of(bytes.fromhex(digest_of_bytes(repr((run.step, places, numbers)).encode())))


def _save_random_states(run: Run, target: Path, identity: str) -> Path:
    """Put this rank's random states, and a list of them, where the main rank saves without a meeting."""
    name, lists = names.random_states_name(run.world.rank), names.list_name(run.world.rank)
    own = target / f"{names.HIDDEN}rank{run.world.rank}"
    own.mkdir(parents=True, exist_ok=True)
    for hook in list(run.save_state_pre_hooks.values()):
        hook(models_for_hooks(run), run.strategy.format.weights(run), str(target))
    try:
        entries = stateful.random_part(run).write(own, run.world.rank)
        (own / names.LISTS_NAME).mkdir()
        Manifest(tuple(entries), run.world.size, save=identity).write(own, lists)
        (target / names.LISTS_NAME).mkdir(exist_ok=True)
        os.replace(own / name, target / name)
        os.replace(own / lists, target / lists)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    run.project.iteration += 1
    return target


@record(frozen=True)
class Transaction:
    """The second half of a save, as one rank sees it; it may be done by a thread while the run trains on."""

    run: Run
    storage: Storage
    identity: str
    written_at: int  # when it began on the main rank, in nanoseconds since the epoch; the same on all ranks
    numbered: bool  # whether it is one of a series, of which `total_limit` are kept
    alone: bool  # whether the main rank saves without the others

    def finish(self, parts: Sequence[Part], hooked: Sequence[str], ranks: Ranks) -> None:
        """Write, agree, complete and put in place; every rank calls it and leaves when all is done."""
        storage, target = self.storage, str(self.storage.target)
        with undone_by(storage.abort):
            with ranks.together(f"Writing the checkpoint {target!r}"):
                entries = self._write(parts, hooked)
            notes = self._notes(parts, ranks)
            doing, found = f"Completing the checkpoint {target!r}", dict[str, int]()
            with ranks.together(doing):
                if storage.leads:
                    entries += self._conclude(parts, notes)
                    found = storage.sizes()
            # Over all ranks and disks: every file that was listed lies there, and no other.
            differ = ranks.total([len(entries) - len(found), sum(each.size for each in entries) - sum(found.values())])
            with ranks.together(doing, _AFTER_COMMIT):
                if storage.leads:
                    self._commit(entries, found, fits=not any(differ))
        limit = self.run.project.total_limit
        if limit is not None and self.numbered and storage.leads:
            storage.prune(limit)
        storage.close()

    def _write(self, parts: Sequence[Part], hooked: Sequence[str]) -> list[Entry]:
        """Write the files of this rank, and its list if another rank leads."""
        staging, rank = self.storage.staging, self.run.world.rank
        entries = [entry for part in parts for entry in part.write(staging, rank)]
        for name in hooked:
            flush(staging / name)
            entries.append(Entry(name, (staging / name).stat().st_size, digest_of(staging / name), rank))
        if entries and not self.storage.leads:
            (staging / names.LISTS_NAME).mkdir(exist_ok=True)
            entries.append(self._manifest(entries).write(staging, names.list_name(rank)))
        self.storage.write(entries)
        return entries

    def _notes(self, parts: Sequence[Part], ranks: Ranks) -> list[dict[str, object]]:
        """Return what the ranks have to say of parts that they share, by rank, where a rank leads."""
        shared = [part for part in parts if isinstance(part, SharedPart)]
        mine = {part.name: part.note for part in shared}
        if mine and self.run.project.save_on_each_node:
            return ranks.exchange(mine)
        # Where every value lies as in the save before, as it mostly does, nothing is sent.
        news = bool(mine) and any(ranks.total([sum(not part.is_known for part in shared)]))
        return ranks.gather(mine) if news else []

    def _conclude(self, parts: Sequence[Part], notes: Sequence[Mapping[str, object]]) -> list[Entry]:
        """Write what can only be written when all ranks have written theirs."""
        concluded: list[Entry] = []
        for part in parts:
            if isinstance(part, SharedPart):
                told = [each.get(part.name) for each in notes]
                concluded += part.conclude(self.storage.staging, self.run.world.rank, told)
        self.storage.write(concluded)
        return concluded

    def _commit(self, entries: Sequence[Entry], found: Mapping[str, int], *, fits: bool) -> None:
        """List everything that lies there, and make it the checkpoint."""
        lists = _ranges(sorted(rank for rank in map(names.listing_rank, found) if rank is not None))
        manifest = replace(self._manifest(entries), versions=versions(), lists=lists or None)
        if fits:
            self.storage.commit(manifest)
            return
        known = set(manifest.joined(lambda name: content_of(self.storage.staging, name)).files())
        known.discard(names.MANIFEST_NAME)
        unlisted, lost = sorted(found.keys() - known)[:_SHOWN], sorted(known - found.keys())[:_SHOWN]
        raise CheckpointError(
            f"The parts of a checkpoint have to list what they write; got {unlisted} that no part lists, and {lost} "
            "that none wrote. Return an Entry for every file from Part.write, and let one run at a time save there."
        )

    def _manifest(self, entries: Sequence[Entry]) -> Manifest:
        world = self.run.world
        ordered = tuple(sorted(entries, key=lambda entry: entry.name))
        absent = world.size - 1 if self.alone else 0
        return Manifest(ordered, world.size, {}, self.written_at, self.identity, absent)


def _ranges(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return rising ranks as the first and the last of those that follow one another.

    >>> _ranges([1, 2, 7])
    ((1, 2), (7, 7))
    """
    found: list[tuple[int, int]] = []
    for rank in ranks:
        found.append((found.pop()[0] if found and found[-1][1] == rank - 1 else rank, rank))
    return tuple(found)
