"""Worker processes that load data, where the process that started them wants to end in good order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any


class IgnoreSigterm:
    """A `worker_init_fn` that leaves SIGTERM to the process that started the worker.

    Schedulers and launchers send SIGTERM to a rank and to everything that it started. A rank that handles the signal,
    in order to save its state, must not lose its workers meanwhile: torch would raise an error in it. Only the rank
    itself ends its workers.
    """

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function

    def __call__(self, worker_id: int) -> None:
        """Block the signal in the worker, and listen for who sends it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_listen, args=(os.getppid(),), name="accel-worker", daemon=True).start()
        if self.function is not None:
            self.function(worker_id)


def ignore_sigterm(function: Callable[[int], Any] | None) -> Callable[[int], Any] | None:
    """Return the `worker_init_fn` for workers that are about to start."""
    # A rank without a handler ends with its workers.
    handled = hasattr(signal, "sigwaitinfo") and callable(signal.getsignal(signal.SIGTERM))
    if not handled or isinstance(function, IgnoreSigterm):
        return function
    return IgnoreSigterm(function)


def _listen(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        continue
    os._exit(0)
