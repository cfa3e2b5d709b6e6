"""kill -9 at any instant of a save: the latest checkpoint is the previous one or the new one, whole."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import random
import runpy
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from accel_core.checkpoint import names
from accel_core.checkpoint.load import load_state
from accel_core.state import reset_all
from accel_testing import limits

SAVER = str(Path(__file__).with_name("saver.py"))
KILLS = int(os.environ.get("ACCEL_TEST_KILLS", "12"))
"""How often the ranks die at a random instant; more often until each phase of a save was hit."""
RANKS = 2
WIDTH = 16
PHASES = ["make room", "write", "agree", "sum", "manifest", "flush", "commit", "place", "prune"]


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Leave no state of this process behind."""
    yield
    reset_all()


def start(directory: Path, size: int, **settings: Any) -> list[BaseProcess]:
    """Start the ranks of a saver."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accel_testing._preload", "torch._dynamo"])
    (directory / "board").write_bytes(b" " * WIDTH * size)
    (directory / "meeting").unlink(missing_ok=True)
    ranks = []
    for rank in range(size):
        everything = {
            "rank": rank,
            "size": size,
            "directory": str(directory),
            "board": str(directory / "board"),
            "log": str(directory / "log"),
            "meeting": str(directory / "meeting"),
            **settings,
        }
        process = context.Process(
            target=runpy.run_path,
            args=(SAVER,),
            kwargs={"init_globals": {"SETTINGS": everything}, "run_name": "saver"},
        )
        process.start()
        ranks.append(process)
    return ranks


def phase(directory: Path, rank: int) -> str:
    """Return the phase that a rank is in, or was in when it died."""
    raw = (directory / "board").read_bytes()
    return raw[rank * WIDTH : (rank + 1) * WIDTH].decode().strip()


def completed(directory: Path) -> int:
    """Return the count of the last save that was reported complete."""
    log = directory / "log"
    counts = log.read_text().split() if log.exists() else []
    return int(counts[-1]) if counts else 0


def count_on_disk(directory: Path, automatic: bool) -> int:
    """Load the latest checkpoint here, on one rank, and return its count; 0 where there is none yet."""
    saver = runpy.run_path(SAVER)
    run = saver["build"]()
    run.project.project_dir = str(directory)
    run.project.automatic_checkpoint_naming = automatic
    target = directory / "ckpt"
    if saver["saved"](directory, automatic) is None:
        return 0
    load_state(run, None if automatic else str(target))
    count: int = saver["count_of"](run)
    return count


def end(ranks: list[BaseProcess], quiet: float = 6.0) -> list[int | None]:
    """Wait for ranks and return their exit codes; kill those that hang."""
    limits.wait_until(lambda: not any(process.is_alive() for process in ranks), quiet=quiet)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return codes


def leftovers(directory: Path) -> list[str]:
    """Return what saves left in their targets."""
    return [str(path) for path in directory.rglob(f"{names.HIDDEN}*")]


def saves_once_more(directory: Path, **settings: Any) -> None:
    """Save without a kill: nothing is left behind, and the new save is loaded."""
    assert end(start(directory, RANKS, seed=0, saves=1, **settings)) == [0] * RANKS
    assert leftovers(directory) == []
    assert count_on_disk(directory, settings["automatic"]) == completed(directory)


def kill(ranks: list[BaseProcess]) -> None:
    """Kill all ranks at once."""
    for process in ranks:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)


def killed_in(directory: Path, wanted: str, later: float, **settings: Any) -> list[str]:
    """Kill all ranks in a phase of a save, check that a whole save is loaded, and return where each rank died."""
    before = completed(directory)
    ranks = start(directory, RANKS, saves=1000, pause=0.005, **settings)
    deadline = limits.Deadline()
    while completed(directory) < before + 1 and not deadline.is_over:
        time.sleep(0.001)
    assert [process.exitcode for process in ranks] == [None] * RANKS
    instant = time.monotonic() + later
    while time.monotonic() < instant or (wanted != "any" and phase(directory, 0) != wanted):
        assert not deadline.is_over, f"no save reached the phase {wanted!r}"
    kill(ranks)
    end(ranks)
    phases = [phase(directory, rank) for rank in range(RANKS)]
    done, found = completed(directory), count_on_disk(directory, settings["automatic"])
    assert found in (done, done + 1), f"{done} saves were complete, and save {found} was loaded"
    return phases


def test_killed_at_random_instants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank killed at once, again and again; no phase of a save is left out."""
    rng = random.Random(1)
    hit: Counter[str] = Counter()
    places = {True: tmp_path / "automatic", False: tmp_path / "fixed"}
    for directory in places.values():
        directory.mkdir()
    (places[False] / "ckpt").mkdir()
    (places[False] / "ckpt" / "notes.txt").write_text("mine")
    number = 0
    while number < KILLS or (set(PHASES) - hit.keys() and number < 4 * KILLS):
        missing = [name for name in PHASES if name not in hit]
        wanted = missing[0] if missing else rng.choice([*PHASES, "any"])
        automatic = wanted == "prune" or rng.random() < 0.5
        directory = places[automatic]
        hit.update(killed_in(directory, wanted, rng.random() * 0.1, seed=number, automatic=automatic))
        if not automatic:
            assert (directory / "ckpt" / "notes.txt").read_text() == "mine"
        number += 1
    with capsys.disabled():
        print(f"\n{number} kills of {RANKS} ranks; phase of each rank when it died: {dict(hit.most_common())}")
    assert set(PHASES) <= hit.keys()
    for automatic, directory in places.items():
        saves_once_more(directory, automatic=automatic)
        if automatic:
            assert len(os.listdir(directory / "checkpoints")) == 2


def test_killed_while_shards_are_saved(tmp_path: Path) -> None:
    """Both ranks killed in each phase of a save in shards: one rank loads the save before or the new one, whole."""
    phases = itertools.cycle(("write", "list", "manifest", "sum", "commit", "place"))
    for number, wanted in enumerate(itertools.islice(phases, KILLS // 2)):
        killed_in(tmp_path, wanted, 0.0, seed=number, automatic=False, sharded=True)
    saves_once_more(tmp_path, automatic=False, sharded=True)


@pytest.mark.parametrize(
    ("kind", "plain", "stride"),
    [
        pytest.param("numbered", False, 1, marks=pytest.mark.full("another case of a grid")),
        pytest.param("fresh", True, 1, marks=pytest.mark.full("another case of a grid")),
        pytest.param("in place", False, 1, marks=pytest.mark.full("another case of a grid")),
        pytest.param("in place", True, 1, marks=pytest.mark.full("another case of a grid")),
        ("in place", True, 4),
    ],
)
def test_killed_between_every_two_system_calls_of_a_save(
    kind: str, plain: bool, stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save dies after the 1st, 2nd, … call, until one gets through, and so do some of the saves that recover."""
    if kind == "in place":
        (tmp_path / "ckpt" / "logs").mkdir(parents=True)
        (tmp_path / "ckpt" / "notes.txt").write_text("mine")
    settings = {"automatic": kind == "numbered", "fresh": kind == "fresh", "plain": plain, "stride": stride}
    assert end(start(tmp_path, 1, seed=0, every_call=True, **settings), quiet=40) == [0]
    with capsys.disabled():
        print(f"\n{completed(tmp_path)} system calls of a save ({kind}{', plain' if plain else ''})")
    assert completed(tmp_path) > 40
    assert end(start(tmp_path, 1, seed=0, automatic=kind == "numbered", plain=plain, saves=1)) == [0]
    assert leftovers(tmp_path) == []
    targets = [*(tmp_path / "checkpoints").glob("*"), *tmp_path.glob("ckpt")]
    assert targets
    assert not [name for target in targets for name in os.listdir(target) if name.startswith(".")]
    if kind == "in place":
        assert (tmp_path / "ckpt" / "notes.txt").read_text() == "mine"
        assert (tmp_path / "ckpt" / "logs").is_dir()


def stop(rank: BaseProcess, store: Path) -> None:
    """Stop a rank, but not while it locks torch's file store: a lock is held up for all, whatever their timeout."""
    assert rank.pid is not None
    while True:
        os.kill(rank.pid, signal.SIGSTOP)
        assert limits.wait_until(
            lambda: Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        )
        with store.open("rb") as file:
            for _ in range(100):  # the other rank has the lock for moments only
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(0.01)
        os.kill(rank.pid, signal.SIGCONT)
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_one_rank_lost_in_save_state_ends_the_others(tmp_path: Path, way: str) -> None:
    """Where one dies, the other ends long before anybody would call it a hang; else when the timeout is over."""
    seconds = limits.limit() if way == "killed" else 3 * limits.slowness()
    ranks = start(tmp_path, RANKS, seed=0, automatic=False, saves=1000, pause=0.005, timeout=seconds)
    while completed(tmp_path) < 1:
        time.sleep(0.005)
    if way == "killed":
        while phase(tmp_path, 1) != "write":
            time.sleep(0.0002)
        kill(ranks[1:])
    else:
        stop(ranks[1], tmp_path / "meeting")
    deadline = limits.Deadline()
    ranks[0].join(limits.limit())
    code = ranks[0].exitcode
    in_time = not deadline.is_over
    if way == "stopped":
        kill(ranks[1:])
    assert end(ranks)[1] == -signal.SIGKILL
    assert code == 1
    assert in_time
    assert count_on_disk(tmp_path, False) in (completed(tmp_path), completed(tmp_path) + 1)
