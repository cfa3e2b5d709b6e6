"""Programs that tests start, and values that tests compare over processes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from threading import Thread
from typing import IO, Any

import torch

import accelerate
from accel_core._records import record
from accel_core.comm.collectives import gather
from accel_core.host import environ
from accelerate._test_backend import device_count

_FIRST_PORT = 29500


class SubprocessCallException(Exception):
    """A program that a test ran ended with another status than 0."""


@record
class RunOutput:
    """What a program did."""

    returncode: int
    stdout: list[str]
    stderr: list[str]


def get_launch_command(**kwargs: object) -> list[str]:
    """Return the words of `accelerate launch` with options."""
    words = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is not None:
            # As in Accelerate, False is written out.
            words.append(f"--{name}" if value is True else f"--{name}={value}")
    return words


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)
"""Words that launch a script on every device of this machine."""


def path_in_accelerate_package(*components: str) -> Path:
    """Return the path of a file of this package."""
    return Path(str(accelerate.__file__)).parent.joinpath(*components)


def run_command(command: list[str], return_stdout: bool = False, env: Mapping[str, str] | None = None) -> str | None:
    """Run a program to its end.

    Raises:
        SubprocessCallException: It ended with another status than 0; the message has all that it wrote.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False)
    if done.returncode != 0:
        raise SubprocessCallException(
            f"A command of a test ends with status 0; got {done.returncode} from `{' '.join(words)}`. "
            f"What it wrote:\n\n{done.stdout}"
        )
    return done.stdout if return_stdout else None


def execute_subprocess_async(
    cmd: list[Any],
    env: Mapping[str, str] | None = None,
    stdin: int | IO[Any] | None = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a program to its end, and show what it writes while it does.

    `timeout` has no effect, as in Accelerate: a slow machine must not fail a test.

    Raises:
        RuntimeError: It ended with another status than 0; the message has what it wrote to its errors.
    """
    words = [str(word) for word in cmd]
    if echo:
        sys.stdout.write(f"\nRunning:  {' '.join(words)}\n")
    found: dict[str, list[str]] = {"stdout": [], "stderr": []}
    with subprocess.Popen(
        words, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=env
    ) as process:
        streams = (("stdout", process.stdout, sys.stdout), ("stderr", process.stderr, sys.stderr))
        readers = [
            # Both at once, or a full pipe would stop the program.
            Thread(target=_keep, args=(stream, found[name], None if quiet else shown, f"{name}:"))
            for name, stream, shown in streams
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    if process.returncode != 0:
        errors = "\n".join(found["stderr"])
        raise RuntimeError(
            f"A program of a test ends with status 0; got {process.returncode} from '{' '.join(words)}'. "
            f"What it wrote to its errors:\n{errors}"
        )
    return RunOutput(process.returncode, found["stdout"], found["stderr"])


def _keep(stream: IO[str], lines: list[str], shown: IO[str] | None, label: str) -> None:
    """Keep the lines of a stream until it ends, and show each."""
    for line in stream:
        lines.append(line.rstrip())
        if shown is not None:
            shown.write(f"{label} {lines[-1]}\n")


def pytest_xdist_worker_id() -> int:
    """Return the number of this worker of pytest-xdist, 0 without it."""
    return int(re.sub(r"^gw", "", str(environ.text("PYTEST_XDIST_WORKER", "gw0"))))


def get_torch_dist_unique_port() -> int:
    """Return a port for the ranks of a test that no other worker of pytest-xdist uses."""
    return _FIRST_PORT + pytest_xdist_worker_id()  # workers run tests at the same time


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether all ranks hold equal tensors; every rank calls it."""
    rows: torch.Tensor = gather(tensor.clone()[None])
    return all(torch.equal(row, rows[0]) for row in rows.cpu())


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Hold that the block raises.

    Raises:
        AssertionError: It raises nothing, something else, or with another message.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class):
            raise AssertionError(f"The block raises {exception_class}; got {type(error)}.") from error
        if msg is not None and msg not in str(error):
            raise AssertionError(f"The message of the error has {msg!r} in it; got {str(error)!r}.") from error
        return
    raise AssertionError(f"The block raises {exception_class}; got no exception.")


def capture_call_output(func: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Return what a function writes to the output."""
    written = io.StringIO()
    with redirect_stdout(written):
        func(*args, **kwargs)
    return written.getvalue()
