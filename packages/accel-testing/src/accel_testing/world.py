"""Test bodies that run on several gloo ranks.

The ranks are forked from a server process that has torch and accel loaded already, so a trivial test on two ranks
takes a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import multiprocessing
import operator
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch.distributed as dist

from accel_core.errors import TorchVersionError
from accel_testing.limits import Deadline, slowness

_F = TypeVar("_F", bound=Callable[..., None])
_PRELOAD = [__name__, "accel_testing._preload"]
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}
_LEAVING = 2.0  # seconds for ranks that are done to let go of their group
_OWN_VERDICT = 2.0  # seconds on a quiet machine in which the other ranks can add their failures to the first


def world(
    size: int | str, *, quiet: float = 6.0, environment: dict[str, str] | None = None, preload: tuple[str, ...] = ()
) -> Callable[[_F], _F]:
    """Run the body of a test on `size` ranks, or on as many as a parameter of that name says, that talk through gloo.

    On a rank, a call of what `torch.distributed` deprecates is an error. A call of what the installed torch lacks skips
    the test, with what accel says of it.

    Fixtures and parameters reach every rank (they have to be picklable; `tmp_path` is the same folder on all). Ranks
    that need a library which takes seconds to import are forked from a server that has its modules of `preload`.

    Example::

        @world(2)
        def test_there_are_two_ranks():
            assert ensure().size == 2
    """

    def decorate(test: _F) -> _F:
        @functools.wraps(test)
        def spread(*args: object, **kwargs: object) -> None:
            ranks: Any = kwargs[size] if isinstance(size, str) else size
            run(test, ranks, args, kwargs, quiet=quiet, environment=environment, preload=preload)

        spread.ranks_body = test  # type: ignore[attr-defined]
        return spread  # type: ignore[return-value]

    return decorate


def server() -> ForkServerContext:
    """Return the context of `multiprocessing` whose processes are forked from one that has torch and accel loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def run(
    body: Callable[..., None],
    size: int,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    quiet: float = 6.0,
    environment: dict[str, str] | None = None,
    preload: tuple[str, ...] = (),
) -> None:
    """Call a function on several ranks that communicate through gloo.

    A rank that fails or hangs fails the test; one that skips (`pytest.skip`) skips it.
    """
    context = server()
    source = inspect.getsourcefile(body)
    assert source is not None, "a test body comes from a file"
    call = functools.partial(_call, source, body.__qualname__, args, kwargs or {})
    with tempfile.TemporaryDirectory(prefix="accel-ranks-") as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(size):
            receiver, sender = context.Pipe()
            variables = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
                # A file and not a port, which two tests at once might both find free.
                "ACCELERATE_DEBUG_RDV_FILE": os.path.join(folder, "meeting"),
                **(environment or {}),
            }
            process: BaseProcess = context.Process(
                target=_rank_main,
                args=(sender, call, variables, _stack(folder, rank)),
                daemon=False,  # a rank may start processes of its own
            )
            _stack(folder, rank).touch()
            _start(process, preload)
            sender.close()
            ranks.append((process, receiver))
        try:
            _collect(ranks, folder, Deadline(quiet))
        finally:
            for _, receiver in ranks:
                receiver.close()
            deadline = time.monotonic() + _LEAVING
            for process, _ in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.join()


def _start(process: BaseProcess, preload: tuple[str, ...]) -> None:
    """Fork a process from the server of all tests, or from one that has loaded more."""
    if not preload:
        return process.start()
    if preload not in _servers:
        _servers[preload] = forkserver.ForkServer()
        _servers[preload].set_forkserver_preload([*preload, *_PRELOAD])
    with patch.object(forkserver, "connect_to_new_process", _servers[preload].connect_to_new_process):
        process.start()


def _collect(ranks: list[tuple[BaseProcess, Connection]], folder: str, deadline: Deadline) -> None:
    """Wait for every rank's verdict; after the first failure, give the others a short time to add theirs."""
    verdicts: dict[int, tuple[str, str]] = {}
    pending = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while pending:
        ready = set(wait(list(pending), timeout=deadline.left))
        if not ready and deadline.is_over:
            break
        for receiver in [receiver for receiver in pending if receiver in ready]:
            rank = pending.pop(receiver)
            try:
                verdicts[rank] = receiver.recv()
            except EOFError:
                ranks[rank][0].join(5)
                ended = f"failed:\nthe process ended with exit code {ranks[rank][0].exitcode}, no verdict; it stood at:"
                verdicts[rank] = ("fail", f"{ended}\n{_stack(folder, rank).read_text()}")
            if verdicts[rank][0] == "fail":
                deadline = Deadline(exactly=min(deadline.left, _OWN_VERDICT * slowness()))
    for rank in pending.values():
        process = ranks[rank][0]
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR2)
            time.sleep(0.3)  # for the stack to be written
        verdicts[rank] = ("fail", f"did not end; it stood at:\n{_stack(folder, rank).read_text()}")
    failed = [f"rank {rank} {text}" for rank, (kind, text) in sorted(verdicts.items()) if kind == "fail"]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    skipped = [text for kind, text in verdicts.values() if kind == "skip"]
    if skipped:
        pytest.skip(skipped[0])


def _stack(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}")


def _call(source: str, qualname: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    imported(source, qualname)(*args, **kwargs)


def _rank_main(sender: Connection, call: Callable[[], None], variables: dict[str, str], stacks: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    warnings.filterwarnings("error", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with open(stacks, "w") as stack:
        faulthandler.enable(file=stack)
        faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
        verdict = ("ok", "")
        try:
            call()
        except (pytest.skip.Exception, TorchVersionError) as skip:
            verdict = ("skip", str(skip))
        except BaseException:
            verdict = ("fail", f"failed:\n{traceback.format_exc()}")
        sender.send(verdict)
        # Nobody leaves before all are done: a rank may still be on its way into the group.
        with contextlib.suppress(EOFError, ConnectionError):
            sender.recv()
        if verdict[0] == "ok" and dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if verdict[0] != "fail" else 1)


def imported(source: str, qualname: str) -> Callable[..., Any]:
    """Import the test's file in this process, and return what has this name there, without its decorator `world`."""
    name = "ranks_" + str(abs(hash(source)))
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = source
    SourceFileLoader(name, source).exec_module(module)
    found = operator.attrgetter(qualname)(module)
    body: Callable[..., Any] = getattr(found, "ranks_body", found)
    return body
