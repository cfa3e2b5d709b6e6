"""What ranks report where they do not agree, or where another one failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from accel_core.errors import RankView

_DIFFERENCES_SHOWN = 8


def remote_message(doing: str, rank: int, failures: Mapping[int, str]) -> str:
    """Write the error message of a healthy rank when others failed."""
    bare = {number: text.rstrip(".") for number, text in failures.items()}
    texts = next(iter(bare.values())) if len(set(bare.values())) == 1 else "; ".join(listed_failures(bare))
    return (
        f"{doing} stopped on rank {rank} because {ranks_text(failures)} failed: {texts}. Fix "
        "the error that it reported; the traceback is in that rank's output."
    )


def listed_failures(failures: Mapping[int, str]) -> list[str]:
    """Return a line for each distinct text, with the ranks that report it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks_of.setdefault(text, []).append(rank)
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]


def lost_message(operation: str, site: str, rank: int, failure: BaseException) -> str:
    """Write the error message for an operation under which the process group itself failed."""
    return (
        f"{operation} at {site} lost the other ranks on rank {rank}: one of them ended, did not come within the "
        f"timeout of the process group, or is in an operation that accel did not start; got {failure}. "
        "Look for the first error in the output of the other ranks; ACCELERATE_DEBUG_MODE=1 names where each rank is."
    )


def ended_message(operation: str, site: str, rank: int, ended: Mapping[int, str]) -> str:
    """Write the error message for an operation that other ranks, some by an error of their own, ended without."""
    failed = {other: text for other, text in ended.items() if text}
    if failed:
        return remote_message(f"{operation} at {site}", rank, failed)
    return f"{ranks_text(ended)} ended without calling {operation} ({site}); {_guess(rank)}"


def _guess(rank: int) -> str:
    place = "`if accelerator.is_main_process`" if rank == 0 else "an `if` on the rank"
    return f"is the call inside {place}? Call it on every rank."


def disagreement_message(views: Sequence[RankView]) -> str:
    """Write every rank's view of an operation on which they disagree."""
    operations = {view.operation for view in views}
    lines = []
    if len(operations) > 1:
        what = "Ranks are in different operations"
        todo = "Make every rank call the same operations in the same order: look for a branch on the rank."
    else:
        what = f"Ranks called {operations.pop()} with different data"
        todo = "Give every rank the same structure, shapes and dtypes; pad_across_processes makes sizes equal."
    everywhere = list(dict.fromkeys(path for view in views for path in view.parts))
    unequal = [path for path in everywhere if len({view.parts.get(path) for view in views}) > 1]
    shown = unequal[:_DIFFERENCES_SHOWN]
    for rank, view in enumerate(views):
        parts = ", ".join(f"{path or 'the tensor'}: {view.parts.get(path, 'absent')}" for path in shown)
        lines.append(f"  rank {rank}: {view.operation} at {view.site}" + (f"; {parts}" if parts else ""))
    if len(unequal) > len(shown):
        lines.append(f"  and {len(unequal) - len(shown)} more parts that differ")
    return "\n".join([f"{what}:", *lines, todo])


def ranks_text(numbers: Iterable[int]) -> str:
    """Write some ranks as `rank 1` or `ranks 1, 3`."""
    listed = sorted(numbers)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {', '.join(map(str, listed))}"
