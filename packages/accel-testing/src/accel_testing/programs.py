"""Python programs that tests fork from a process that has torch loaded, so that each need not load it once more."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing import process as processes
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from subprocess import Popen, TimeoutExpired
from typing import Any

from accel_testing import limits
from accel_testing.world import server

_path: list[str] = []
"""What Python looks through for modules after the program's own folder."""


class Program(Popen[str]):
    """`Popen` of `[sys.executable, "-m", MODULE, …]` or `[sys.executable, SCRIPT, …]`, in text.

    What the program starts itself is started as ever. In /proc it has the command line and the environment of the
    process that it was forked from.
    """

    _with_ranks = False

    def _execute_child(self, args: Sequence[str], *settings: Any) -> None:
        cwd, env, pipes = settings[4], settings[5], settings[9:15]
        ends = (pipes[0], pipes[3], pipes[5])
        streams = [Connection(os.dup(number if end == -1 else end)) for number, end in enumerate(ends)]
        place = os.fspath(cwd or os.getcwd())
        self._process = server().Process(
            target=_begin,
            args=(self._with_ranks, args[1:], place, dict(env or os.environ), streams),
            daemon=True,
        )
        self._process.start()
        for stream in streams:
            stream.close()
        self.pid, self._child_created = self._process.pid or 0, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


class ProgramAndRanks(Program):
    """A program whose own Python programs, such as the ranks that it launches, are forked from it.

    They are its children, in sessions of their own where it asks for them, and load neither torch nor accel again. For
    tests of what ranks do; how ranks are started is tested with `Program`.
    """

    _with_ranks = True


def _begin(forks: bool, words: list[str], folder: str, variables: dict[str, str], streams: list[Connection]) -> None:
    """Be a program, whose children are forked from it if they are to be."""
    _path[:] = sys.path
    if forks:
        subprocess.Popen._execute_child = _fork  # type: ignore[attr-defined]
    _run(words, folder, variables, streams)


_start_anew = Popen._execute_child  # type: ignore[attr-defined]


def _fork(process: Any, args: Sequence[str | os.PathLike[str]] | str, *settings: Any) -> None:
    """Fork a child that is to be a Python program; start any other as ever."""
    words = [] if isinstance(args, (str, bytes, os.PathLike)) else [os.fspath(word) for word in args]
    program = next((word for word in words[1:] if word != "-u"), "-")
    first, kept, cwd, env, shell, pipes = settings[1], *settings[3:6], settings[8], settings[9:15]
    if words[:1] != [sys.executable] or (program[0] == "-" and program != "-m") or first or kept or shell:
        _start_anew(process, args, *settings)
        return
    process.pid = _fork_with_resolver()
    if process.pid:
        process._child_created = True
        process._close_pipe_fds(*pipes)
        return
    try:
        gc.freeze()  # what the parent left would close its files under their numbers
        _forget_the_parent()
        if settings[-2]:
            os.setsid()
        streams = [os.dup(number if end == -1 else end) for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)  # the parent's, which was closed just now
        for each in signal.valid_signals():
            if callable(signal.getsignal(each)):
                signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
        random.seed()  # or all children would draw the same numbers
        _run(words[1:], os.fspath(cwd or os.getcwd()), dict(os.environ if env is None else env), [])
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _fork_with_resolver() -> int:
    """Fork a child that can look up names, and return its number, 0 in the child.

    It never can where a thread of the parent did so at that moment, as a store of torch does for each rank that
    connects: the C library leaves its lock closed in the child. Another one is forked then.
    """
    while True:
        hear, tell = os.pipe()
        pid = os.fork()
        if not pid:
            socket.getfqdn("localhost")  # does not raise where the name is unknown
            os.write(tell, b".")
            return 0
        os.close(tell)
        heard = select.select([hear], [], [], 10)[0] and os.read(hear, 1)
        os.close(hear)
        if heard:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run(words: list[str], folder: str, variables: dict[str, str], streams: list[Connection]) -> None:
    """Be the program, to its end."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    if words[0] == "-u":
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
        del words[0]
    faulthandler.register(limits.STACKS)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    _forget_the_server()
    first = folder if words[0] == "-m" else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [first, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *_path]
    code = 1
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as left:
        code = _status(left.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    # Waits for threads as Python does at its end.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # which `os._exit` does not call
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _forget_the_parent() -> None:
    """Leave to the parent what it has to do at its end, such as to delete its temporary folders."""
    # The pipe to the tracker of semaphores was closed: this process starts its own when it needs one.
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(util._exit_function)  # type: ignore[attr-defined]


def _forget_the_server() -> None:
    """Make this process a main process, which may start others through `multiprocessing`."""
    this: Any = multiprocessing.current_process()
    this._identity, this._name, this._parent_pid, this._config["daemon"] = (), "MainProcess", None, False
    processes._parent_process = None  # type: ignore[attr-defined]


def _status(code: object) -> int:
    """Return the status of `sys.exit(code)`, whose words are printed as Python prints them."""
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1
