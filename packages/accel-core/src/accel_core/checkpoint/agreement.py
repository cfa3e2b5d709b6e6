"""Which save the ranks of a save or restore agree on before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel_core.checkpoint import commit, names
from accel_core.checkpoint.digest import digest_of, digest_of_bytes
from accel_core.checkpoint.manifest import FoundSave
from accel_core.checkpoint.ranks import Ranks
from accel_core.errors import CheckpointMismatchError, CheckpointNotFoundError

__all__ = ["agree_on_latest", "agree_on_save", "common_saves"]


def common_save(everywhere: Sequence[Sequence[FoundSave]]) -> str | None:
    """Return the id of the newest save that every rank holds, whole before damaged; `None` if there is none.

    A save that one disk has committed was prepared on all disks before, so it counts as committed on all of them.
    """
    shared = set.intersection(*({save.identity for save in own} for own in everywhere)) if everywhere else set()

    def worth(identity: str) -> tuple[bool, bool, int]:
        those = [save for own in everywhere for save in own if save.identity == identity]
        whole = all(any(save.identity == identity and save.whole for save in own) for own in everywhere)
        return whole, any(save.committed for save in those), max(save.written_at for save in those)

    return max(sorted(shared), key=worth, default=None)


def common_saves(target: Path, ranks: Ranks, numbered: bool) -> dict[str, str]:
    """Return which save all disks hold of each target that a crash left several of; no id where there is none."""
    left = {other.name for other in commit.unrecovered(target.parent)} if numbered else set()
    # In one order on all ranks: what each rank found is matched by place.
    looked_at = sorted(set().union({target.name}, *ranks.exchange(left)))
    everywhere = ranks.exchange([commit.saves_of(target.with_name(name), ranks.shares) for name in looked_at])
    saves = zip(looked_at, zip(*everywhere, strict=True), strict=True)
    return {name: common_save(found) or "" for name, found in saves}


def agree_on_save(target: Path, ranks: Ranks) -> FoundSave | None:
    """Return what this rank holds of the newest save to `target` that every rank holds."""
    before: list[list[FoundSave]] | None = None
    while True:
        with ranks.together(f"Opening the checkpoint {str(target)!r}"):
            own = _with_identities(commit.saves_of(target, ranks.shares), ranks.size > 1)
        if ranks.size == 1:
            return next(iter(own), None)
        everywhere = ranks.exchange(own)
        if not any(everywhere):
            return None
        chosen = common_save(everywhere)
        if chosen is not None:
            return next(save for save in own if save.identity == chosen)
        # A save of another process between the looks of two ranks makes them differ for a moment only.
        if everywhere == before:
            raise CheckpointMismatchError(
                "The ranks do not hold the same save of the checkpoint, and nothing was changed; got:\n"
                f"{_listed(everywhere)}\nPass the same checkpoint on all ranks, or copy it to the disks that lack it."
            )
        before = everywhere


def agree_on_latest(directory: Path, ranks: Ranks) -> Path:
    """Return the target of the newest numbered checkpoint of which every rank holds the same save, whole."""
    seen: list[str] = []
    below: int | None = None
    while True:
        with ranks.together(f"Looking for checkpoints in {str(directory)!r}"):
            number, own = _newest(directory, below, ranks)
        numbers, everywhere = zip(*ranks.exchange((number, own)), strict=True)
        if max(numbers) >= 0:
            seen.append(_listed(everywhere))
        lowest = min(numbers)
        if lowest < 0:
            break
        agreed = max(numbers) == lowest
        if agreed and common_save(everywhere) is not None:
            return directory / f"checkpoint_{lowest}"
        # Where they differ, the ranks with a newer one look whether they have the lowest too.
        below = lowest if agreed else lowest + 1
    found = "\n" + "\n".join(seen) + "\n" if seen else f"{len(commit.numbered(directory))} folders so named. "
    raise CheckpointNotFoundError(
        f"There is no complete checkpoint_<number> in {str(directory)!r} that every rank holds; got {found}"
        "Start the run from the beginning."
    )


def _newest(directory: Path, below: int | None, ranks: Ranks) -> tuple[int, list[FoundSave]]:
    """Return the highest number under `below` with a whole checkpoint, and what there is of it; -1 for none."""
    for target in reversed(commit.numbered(directory)):
        number = int(target.name.rpartition("_")[2])
        if below is None or number < below:
            whole = [save for save in commit.saves_of(target, ranks.shares) if save.whole]
            if whole:
                return number, _with_identities(whole, ranks.size > 1)
    return -1, []


def _with_identities(found: list[FoundSave], several: bool) -> list[FoundSave]:
    """Give folders of Accelerate, which have no id, a digest of their content; one rank has nothing to compare with."""
    return [replace(save, identity=save.identity or _content_of(save.folder)) if several else save for save in found]


def _content_of(folder: Path) -> str:
    """Return a digest of the files that all ranks share in a folder without a manifest; of shards, of their list."""
    shared = [
        name
        for name in names.found_in(folder)
        if not name.startswith(names.RNG_STATE_NAME)
        and ("/" not in name or name.endswith("/.metadata"))
        and (folder / name).is_file()
    ]
    digests = [f"{name} {digest_of(folder / name)}" for name in shared]
    return f"content {digest_of_bytes(chr(10).join(digests).encode())[:12]}"


def _listed(everywhere: Sequence[Sequence[FoundSave]]) -> str:
    """Say who holds what, one line for each rank."""
    lines = []
    for rank, own in enumerate(everywhere):
        what = ", ".join(f"{save.identity}{'' if save.whole else ' (incomplete)'} in {save.folder}" for save in own)
        lines.append(f"rank {rank}: {what or 'nothing'}")
    return "\n".join(lines)
