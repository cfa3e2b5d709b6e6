"""SwanLab."""

from __future__ import annotations

from typing import Any

from accel_core.tracking.tracker import on_main_process
from accel_trackers import values as sorting
from accel_trackers.run import RunTracker

_NO_STEP = -1


class SwanLabTracker(RunTracker):
    """Logs to a run of SwanLab.

    Args:
        run_name: The project.
        **kwargs: Passed to `swanlab.init`.

    Attributes:
        run: The run, once started.
    """

    name = "swanlab"
    libraries = ("swanlab",)

    def unused_folder(self) -> str | None:
        """Return the folder of an offline run without a step; the number of its last step has no public name."""
        context = getattr(self.run, "_ctx", None)
        unused = self.run.mode == "offline" and getattr(context, "_global_step", 0) == _NO_STEP
        return str(self.run.dir) if unused else None

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log values at a step: numbers, texts, SwanLab's media; anything else as its text."""
        import swanlab

        parts = sorting.sort(values, ("swanlab",))
        texts = {name: swanlab.Text(text) for name, text in parts.texts.items()}
        numbers = {name: float(number) for name, number in parts.numbers.items()}
        self.run.log({**numbers, **texts, **parts.natives}, step=step, **kwargs)
