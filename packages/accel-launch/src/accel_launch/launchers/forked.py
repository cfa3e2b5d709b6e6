"""Processes forked from this one under torch's elastic agent, for functions that no other process can import."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accel_core.errors import LaunchError

__all__ = ["run_forked"]


def run_forked(function: Callable[..., Any], args: Sequence[Any], **settings: Any) -> None:
    """Run a function in forked processes.

    Args:
        function: The function.
        args: Its arguments.
        **settings: Those of torch's `LaunchConfig`.

    Raises:
        LaunchError: A process failed; the message ends with its traceback.
    """
    config = LaunchConfig(start_method="fork", **settings)
    try:
        elastic_launch(config, function)(*args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message
        if isinstance(message, dict):
            message = message.get("extraInfo", {}).get("py_callstack") or message.get("message")
        raise LaunchError(f"Rank {rank} failed first, with exit code {failure.exitcode}:\n{message}") from None
