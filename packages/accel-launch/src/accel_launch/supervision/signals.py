"""Signals to the launcher: the first ends the run with time to save, the second at once; some are only forwarded."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that reach every process of the run, and end it."""

FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on to the ranks, which decide what they mean."""

TERMINATION_GRACE_S = 30.0
"""Seconds that processes have to end after a signal that a person or a scheduler sent: time to save a state."""


class SignalHandlers:
    """The launcher's handling of signals.

    Python lets the main thread alone handle signals. A launcher in another thread leaves them to the program around it.
    """

    def __init__(
        self,
        on_first: Callable[[signal.Signals], None],
        on_again: Callable[[], None],
        forward: Callable[[signal.Signals], None],
    ) -> None:
        self.first: signal.Signals | None = None
        self._on_first, self._on_again, self._forward = on_first, on_again, forward
        self._before = {number: signal.getsignal(number) for number in (*SIGNALS, *FORWARDED_SIGNALS)}
        self._may_handle = threading.current_thread() is threading.main_thread()

    def install(self) -> None:
        """Take over the signals, also those that a library has taken over since the last call.

        A hangup stays ignored where it was, as `nohup` asks for.
        """
        for numbers, handler in ((SIGNALS, self._end), (FORWARDED_SIGNALS, self._pass)):
            for number in numbers:
                ignored = number == signal.SIGHUP and self._before[number] == signal.SIG_IGN
                self._set(number, signal.SIG_IGN if ignored else handler)

    def repeat(self) -> None:
        """Handle the first signal again if it came: there may have been no process yet to pass it to."""
        if self.first is not None:
            self._on_first(self.first)

    def ignore(self) -> None:
        """Ignore all signals during the remaining cleanup."""
        for number in (*SIGNALS, *FORWARDED_SIGNALS):
            self._set(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            self._set(number, handler)

    def _set(self, number: signal.Signals, handler: Any) -> None:
        if self._may_handle:
            signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
            self._on_first(self.first)
        else:
            self._on_again()

    def _pass(self, number: int, frame: FrameType | None) -> None:
        self._forward(signal.Signals(number))
