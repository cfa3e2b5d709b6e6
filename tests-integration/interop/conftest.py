"""Runs one client script on the drop-in and on Accelerate 1.15.0, gives both results, and prints a table at the end.

A client is a program under `clients/` that uses a released library and prints one line of JSON. `ACCEL_PEER_PYTHON`
names the Python of an environment with the same libraries and the original.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from accel_testing import limits

CLIENTS = Path(__file__).parent / "clients"


class Client(NamedTuple):
    """A program that uses a library.

    Attributes:
        title: What it does with the library.
        library: The distribution.
    """

    title: str
    library: str


PROGRAMS = {
    "trainer": Client("Trainer, one process", "transformers"),
    "trainer_ranks": Client("Trainer, two gloo ranks", "transformers"),
    "trainer_kinds": Client("streams, compiled, subclassed, pickled; one process and two ranks", "transformers"),
    "offload": Client("models and adapters on CPU and disk", "peft"),
    "adapters": Client("training an adapter; one process and two ranks", "peft"),
    "trl_trainers": Client("SFT, DPO and reward trainers; one process and two ranks", "trl"),
    "trl_command": Client("`trl sft` and `trl dpo`", "trl"),
    "diffusion": Client("offloaded and mapped models", "diffusers"),
    "diffusion_loop": Client("training loop; one process and two ranks", "diffusers"),
    "scripts": Client("published training scripts, saved and resumed; one process and two ranks", "diffusers"),
    "diffusion_offload": Client("offload and device maps, simulated accelerator", "diffusers"),
    "encoder": Client("encoding and training; one process and two ranks", "sentence-transformers"),
    "fewshot": Client("training a classifier on few samples", "setfit"),
    "evaluation": Client("evaluation loop as in lm-eval", "transformers"),
}


class Pair(NamedTuple):
    """What a client found on both sides."""

    ours: dict[str, Any]
    theirs: dict[str, Any]


@dataclass
class Row:
    """A line of the table: how long a client took on either side, in seconds, and how its tests ended."""

    seconds: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)


ROWS = pytest.StashKey[dict[str, Row]]()
ASKED = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin an empty table."""
    config.stash[ROWS], config.stash[ASKED] = {}, set()


def run_client(python: str, words: list[str], folder: Path, **variables: str) -> dict[str, Any]:
    """Run a client in a folder of its own or of one before, without network or GPU, and return what it found."""
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",  # diffusers orders a pipeline's models by a set of their names
        **variables,
    }
    done = limits.run([python, *words], cwd=folder, env=environment, quiet=60, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="session")
def peer() -> str:
    """Return the Python of the environment with the original."""
    python = os.environ.get("ACCEL_PEER_PYTHON")
    if not python:
        pytest.skip("ACCEL_PEER_PYTHON names no environment with Accelerate 1.15.0; `nox -s interop` makes one")
    return python


@pytest.fixture(scope="session")
def original_alone(peer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that holds nothing but the original, so that one Python runs the same program on either."""
    where = "import importlib.util; print(importlib.util.find_spec('accelerate').origin, end='')"
    found = subprocess.run([peer, "-I", "-c", where], stdout=subprocess.PIPE, text=True, check=True)
    folder = tmp_path_factory.mktemp("original")
    for path in Path(found.stdout).parents[1].glob("accelerate*"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function that gives what a client finds on the drop-in in one process; each runs once."""

    @functools.cache
    def run(name: str) -> dict[str, Any]:
        return run_client(sys.executable, [str(CLIENTS / f"{name}.py")], tmp_path_factory.mktemp(name) / "alone")

    return run


@pytest.fixture(scope="session")
def on_devices(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function that gives what a client finds on two simulated accelerators; each runs once."""
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("the simulated accelerator is built by g++ and ninja, and one of them is not installed")

    @functools.cache
    def run(name: str) -> dict[str, Any]:
        words = [*_launch(2), str(CLIENTS / "on_devices.py"), name]
        return run_client(sys.executable, words, tmp_path_factory.mktemp(name) / "devices")

    return run


@pytest.fixture(scope="session")
def compare(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, peer: str) -> Callable[..., Pair]:
    """Return a function that gives what a client finds on both sides, on some ranks; each runs once.

    With phases, which are words for its command line, the client runs once for each, in the same folder, and what it
    found in the last one counts.
    """

    @functools.cache
    def run(name: str, ranks: int, phases: tuple[str, ...]) -> Pair:
        row = pytestconfig.stash[ROWS].setdefault(name, Row())
        folder = tmp_path_factory.mktemp(name)
        words = [*_launch(ranks), str(CLIENTS / f"{name}.py")]
        found = []
        path = os.environ.get("PYTHONPATH", "")  # may name a tree of this project, which the original must not find
        for side, python, packages in (("ours", sys.executable, path), ("theirs", peer, "")):
            begun = time.monotonic()
            runs = [[*words, *phase.split()] for phase in phases] or [words]
            found.append([run_client(python, each, folder / side, PYTHONPATH=packages) for each in runs][-1])
            row.seconds.append(time.monotonic() - begun)
        return Pair(*found)

    def ask(name: str, ranks: int = 1, phases: tuple[str, ...] = ()) -> Pair:
        pytestconfig.stash[ASKED].add(name)
        return run(name, ranks, phases)

    return ask


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[dict[str, Any], dict[str, Any]]]:
    """Return a function that gives what a client finds on the drop-in: on some ranks, which share it, and on one."""

    @functools.cache
    def run(name: str, ranks: int) -> dict[str, Any]:
        words = [*_launch(ranks), str(CLIENTS / f"{name}.py")]
        return run_client(sys.executable, words, tmp_path_factory.mktemp(name) / "run", OMP_NUM_THREADS="1")

    return lambda name, ranks=2: (run(name, ranks), run(name, 1))


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what runs find that shard on two ranks, that go on from their checkpoints, and on one process."""
    folder, client = tmp_path_factory.mktemp("fsdp_resume"), str(CLIENTS / "fsdp_resume.py")
    straight, again = (
        run_client(sys.executable, [*_launch(2), client, action], folder / "two", OMP_NUM_THREADS="1")
        for action in ("straight", "resumed")
    )
    return straight, again, run_client(sys.executable, [client, "straight"], folder / "one", OMP_NUM_THREADS="1")


def _launch(ranks: int) -> list[str]:
    """Return the words of a command line that start as many ranks."""
    return [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def _is_numbers(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and all(isinstance(item, float) for item in value))


@pytest.fixture(scope="session")
def assert_alike() -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return a check that ranks agree, and found what others did: numbers to single precision, the rest exactly."""

    def check(ours: dict[str, Any], others: dict[str, Any]) -> None:
        assert ours["ranks agree"]
        assert ours.keys() == others.keys()
        for name, value in ours.items():
            expected = others[name]
            assert value == (pytest.approx(expected, rel=1e-4, abs=1e-5) if _is_numbers(value) else expected), name

    return check


@pytest.fixture(scope="session")
def assert_close() -> Callable[..., None]:
    """Return a check that what some runs logged is what others did, to single precision."""

    def check(found: dict[str, Any], expected: dict[str, Any], *keys: str, within: float = 1e-4) -> None:
        for key in keys:
            assert found[key] == pytest.approx(expected[key], rel=within, abs=1e-5), key

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note how a test ended under the clients that it asked for."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        for name in item.config.stash[ASKED]:
            item.config.stash[ROWS].setdefault(name, Row()).outcomes.append(report.outcome)
    if report.when == "teardown":
        item.config.stash[ASKED].clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table: client, result, seconds."""
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("clients on the drop-in and on Accelerate 1.15.0")
    terminalreporter.write_line("| library | client | result | drop-in, s | original, s |")
    terminalreporter.write_line("|---|---|---|---|---|")
    for name, program in PROGRAMS.items():
        if name in rows:
            taken = rows[name].seconds  # ours and the original's by turns
            seconds = [f"{sum(taken[side::2]):.1f}" if taken else "" for side in (0, 1)]
            cells = (_library(program.library), program.title, _result(rows[name].outcomes), *seconds)
            terminalreporter.write_line(f"| {' | '.join(cells)} |")


def _library(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name}, not installed"


def _result(outcomes: list[str]) -> str:
    passed = outcomes.count("passed")
    others = [f"{outcomes.count(other)} {other}" for other in ("failed", "skipped") if other in outcomes]
    return ", ".join([f"{passed} of {len(outcomes)} hold", *others])
