"""Logging that knows its rank: by default the main process speaks for all."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from accel_core.comm import control
from accel_core.errors import StateError
from accel_core.host import environ
from accel_core.process import rendezvous
from accel_core.process.world import current


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic only for type checkers before 3.11
    """A logger that writes on the main process alone, unless it is told otherwise.

    Every method for a level takes two more keyword arguments: `main_process_only` (true by default), and `in_order`,
    which lets all ranks write, one after the other; with `in_order` every rank has to make the call.
    """

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        """Return whether this process writes a message that only the main process is, or is not, to write."""
        return not main_process_only or _rank() == 0

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a message.

        Raises:
            StateError: `in_order` is asked for before the processes know each other.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        if in_order:
            self._log_in_order(level, msg, args, kwargs)
        elif self._should_log(main_process_only):
            text, options = self.process(msg, kwargs)
            self.logger.log(level, text, *args, **options)

    def _log_in_order(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        world = current()
        if world is None:
            raise StateError(
                "Ranks can write in order only after they met; no PartialState or Accelerator exists yet. "
                "Make one first, or leave out in_order."
            )
        # One frame more, so that the record names the line of the caller.
        text, options = self.process(msg, {**kwargs, "stacklevel": kwargs.get("stacklevel", 2) + 1})
        for rank in range(world.size):
            if rank == world.rank:
                self.logger.log(level, text, *args, **options)
            control.wait_for_all(world, "writing a message in order")

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank in front of the message, and the place of the call into the record."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {_rank()}] {msg}", kwargs

    def warning_once(self, *args: object, **kwargs: Any) -> None:
        """Write a warning the first time that this logger is asked to write it."""
        logged: set[tuple[Any, ...]] = self.__dict__.setdefault("_logged", set())
        key = (args, tuple(sorted(kwargs.items())))
        if key not in logged:
            logged.add(key)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 2) + 1
            self.warning(*args, **kwargs)


def _rank() -> int:
    return (current() or rendezvous.locate()).rank


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger called `name`, in a form that knows about ranks.

    Args:
        name: Usually `__name__`.
        log_level: Severity from which it writes, such as `"INFO"`, set on the root logger too. ACCELERATE_LOG_LEVEL
            says it where this does not; without both, severities stay as they are.

    Examples:
        >>> logger = get_logger(__name__, log_level="INFO")
        >>> logger.info("on the main process")
        >>> logger.info("on every process", main_process_only=False)
    """
    level = log_level if log_level is not None else environ.text("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
