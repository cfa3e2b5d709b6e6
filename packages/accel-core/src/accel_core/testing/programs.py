"""Python programs that tests fork from a process that has torch loaded, so that each need not load it once more."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import process as processes
from multiprocessing.connection import Connection
from subprocess import Popen, TimeoutExpired
from typing import Any

from accel_core.testing.world import server

__all__ = ["Program"]


class Program(Popen[str]):
    """`Popen` of `[sys.executable, "-m", MODULE, …]` or `[sys.executable, SCRIPT, …]`, in text.

    What the program starts itself is started as ever. In /proc it has the command line and the environment of the
    process that it was forked from.
    """

    def _execute_child(self, args: Sequence[str], *settings: Any) -> None:
        cwd, env, pipes = settings[4], settings[5], settings[9:15]
        ends = (pipes[0], pipes[3], pipes[5])
        streams = [Connection(os.dup(number if end == -1 else end)) for number, end in enumerate(ends)]
        place = os.fspath(cwd or os.getcwd())
        self._process = server().Process(
            target=_run, args=(args[1:], place, dict(env or os.environ), sys.path, streams), daemon=True
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


def _run(words: list[str], folder: str, variables: dict[str, str], path: list[str], streams: list[Connection]) -> None:
    """Be the program, to its end."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    _forget_the_server()
    first = folder if words[0] == "-m" else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [first, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *path]
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
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


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
