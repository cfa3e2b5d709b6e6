"""Runs a script straight and interrupted, and compares what was recorded."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_core.checkpoint.address import Address
from accel_core.checkpoint.names import folder_of, fresh_id
from accel_core.checkpoint.remote.store import Store
from accel_core.errors import ConfigurationError, LaunchError
from accel_core.host import environ
from accel_core.host.ports import get_free_port
from accel_core.host.program.run_module import own_command
from accel_verify.parallel.draws import cured
from accel_verify.ranks import ended_by_sigterm, rank_variables, run_ranks

ASPECTS = ("data order", "learning rate", "parameters", "optimizer", "random states")
"""What is compared after each step: causes before their effects."""


@dataclass(frozen=True)
class Difference:
    """The first difference."""

    step: int  # counting from 1
    rank: int
    aspect: str
    detail: str

    def __str__(self) -> str:
        """Return one line."""
        return f"step {self.step}, rank {self.rank}: {self.aspect} differs: {self.detail}"


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigurationError: Impossible steps, or a script that does not exist.
        LaunchError: The script failed.
    """
    args.steps = args.steps or 2 * (args.at or 3)
    args.at = args.steps // 2 if args.at is None else args.at
    if not 0 < args.at < args.steps:
        raise ConfigurationError(
            f"The interruption has to be inside the run; got --at {args.at} of --steps {args.steps}. "
            "Choose 0 < at < steps."
        )
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="accel-check-resume-") as folder, _kept(args) as kept:
        place = Path(folder)
        saves = place if kept is None else kept
        saved, project = str(saves / "state"), saves / "interrupted project"
        straight = _records(args, place / "straight", 0, args.steps, "-", "-", place / "straight project")
        before = _records(args, place / "before", 0, args.at, saved, "-", project)
        after = _records(args, place / "after", args.at, args.steps, "-", saved, project)
    interrupted = [one + two for one, two in zip(before, after, strict=True)]
    way = _way(restores=after[0][0]["restores"])
    found = compare(straight, interrupted)
    if found is not None:
        calls = straight[found.rank][found.step - 1]["unseeded"]
        if calls:
            print(f"not comparable: {cured(calls)}\n{found}")
            return 1
        kind = "the resumed run differs" if found.step > args.at else "the runs differ already before the interruption"
        print(f"{found}\n{kind}: {args.script}, interrupted after step {args.at} of {args.steps}; {way}")
        return 1
    print(
        f"identical: {args.script}, interrupted after step {args.at} of {args.steps}, on {args.num_processes} "
        f"process{'es' if args.num_processes > 1 else ''}: {', '.join(ASPECTS)}; {way}"
    )
    return 0


@contextlib.contextmanager
def _kept(args: argparse.Namespace) -> Iterator[Address | None]:
    """Return a place of its own below the address of `--store`, and delete what was saved there afterwards."""
    below = folder_of(args.store) if args.store else None
    if below is not None and not isinstance(below, Address):
        raise ConfigurationError(
            f"--store is an address in an object store; got {args.store!r}. Leave it out to save on this machine."
        )
    name = f"check-resume-{fresh_id()}"
    try:
        yield None if below is None else Address(below / name)
    finally:
        if below is not None:
            Store(below).delete_folder(name)


def _way(*, restores: bool) -> str:
    """Return how the resumed run got to its place in the data."""
    if restores:
        return "load_state restored the position of loaders"
    return (
        "load_state left loaders at the start of an epoch, as in Accelerate, so the script has to skip batches "
        "(restore_position=True or ACCEL_RESTORE_POSITION=1 restores their position)"
    )


def compare(straight: list[list[dict[str, Any]]], interrupted: list[list[dict[str, Any]]]) -> Difference | None:
    """Return the first difference between two runs, or `None`."""
    for records in zip(
        *(zip(one, two, strict=True) for one, two in zip(straight, interrupted, strict=True)), strict=True
    ):
        for aspect in ASPECTS:  # causes first: the first difference found is named
            for rank, (one, two) in enumerate(records):
                for detail in _differences(one[aspect], two[aspect], aspect):
                    return Difference(one["step"], rank, aspect, detail)
    return None


def _differences(one: dict[str, Any], two: dict[str, Any], aspect: str) -> Iterator[str]:
    for name in sorted(one.keys() | two.keys()):
        if one.get(name) != two.get(name):
            what = f"batch {name} of the step" if aspect == "data order" else name
            yield f"{what} is {two.get(name, 'not there')} instead of {one.get(name, 'not there')}"


def _records(
    args: argparse.Namespace, place: Path, first: int, last: int, save: str, load: str, project: Path
) -> list[list[dict[str, Any]]]:
    """Run the script from one step to another on all ranks, and return the records of each rank."""
    place.mkdir()
    if not isinstance(project, Address):
        project.mkdir(exist_ok=True)
    port = get_free_port()
    ranks = range(args.num_processes)
    words = [str(first), str(last), save, load, str(project), args.script, *args.script_arguments]
    ended = run_ranks(
        [own_command("accel_verify.resume.recorder", str(place / f"{rank}.jsonl"), *words) for rank in ranks],
        [_environment(args, rank, port) for rank in ranks],
        place,
        args.timeout,
    )
    if ended.failed is not None:
        raise LaunchError(
            f"The script failed on rank {ended.failed} with exit code {ended.codes[ended.failed]}; it printed last:\n"
            f"{ended.tail(ended.failed)}\nMake it run by itself first."
        )
    found = [[json.loads(line) for line in (place / f"{rank}.jsonl").read_text().splitlines()] for rank in ranks]
    made = first + min(map(len, found))
    if made < last:  # a process can exit with 0 in ways that its recorder does not see, such as os._exit
        raise LaunchError(
            f"The script ended before the step that --steps asks for; it made {made} optimizer steps of {last} with "
            "prepared loaders. Ask for fewer --steps, and prepare the training loader."
        )
    return found


def _environment(args: argparse.Namespace, rank: int, port: int) -> dict[str, str]:
    variables = environ.snapshot()
    if args.cpu:
        variables["ACCELERATE_USE_CPU"] = "true"
    variables |= rank_variables(rank, args.num_processes, port)
    variables.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with which its sums repeat
    if args.num_processes > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, and sums do not depend on their number
    return variables
