"""What Accelerate asks of states and their plugins, and accel itself does not."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from accel_core.errors import StateError

if TYPE_CHECKING:
    from accel_deepspeed.plugin import DeepSpeedPlugin


class ThreadLocalSharedDict(threading.local):
    """A descriptor that holds one dictionary for each thread, for runtimes that run ranks as threads."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}  # threading.local runs this once in each thread

    def __get__(self, obj: object, objtype: type | None = None) -> dict[str, Any]:
        """Return this thread's dictionary."""
        return self._storage

    def __set__(self, obj: object, value: dict[str, Any]) -> None:
        """Replace this thread's dictionary."""
        self._storage = value


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the plugin in use.

    Raises:
        StateError: The run does not use DeepSpeed, or none of its plugins is selected.
    """
    plugins = state.deepspeed_plugins
    if plugins is not None:
        candidates = plugins.values() if isinstance(plugins, dict) else [plugins]
        for plugin in candidates:
            if plugin.selected or not isinstance(plugins, dict):
                return plugin  # type: ignore[no-any-return]
    raise StateError(
        f"No DeepSpeed plugin is in use; got distributed_type={state.distributed_type}. "
        "Make the Accelerator with a deepspeed_plugin, or select one with `select_deepspeed_plugin(name)`."
    )
