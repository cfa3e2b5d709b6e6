"""SwanLab."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from accel_core.tracking.tracker import GeneralTracker, on_main_process
from accel_trackers import values as sorting

__all__ = ["SwanLabTracker"]


class SwanLabTracker(GeneralTracker):
    """Logs to a run of SwanLab.

    Args:
        run_name: The project.
        **kwargs: Passed to `swanlab.init`.

    Attributes:
        run: The run, once started.
    """

    name = "swanlab"
    requires_logging_directory = False
    main_process_only = False
    libraries = ("swanlab",)

    @on_main_process
    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None
        self._finished = False

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        import swanlab

        self.run = swanlab.init(project=self.run_name, **self.init_kwargs)
        self._finished = False

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as a table, and exactly under `accel_config`.

        Args:
            values: Any nesting of anything.
        """
        table, document = sorting.config_table(values)
        self.run.config.update({**table, "accel_config": json.dumps(document)})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values at a step.

        Args:
            values: By name: numbers, texts, SwanLab's media; anything else as its text.
            step: Number of the step.
            **kwargs: Passed to `run.log`.
        """
        import swanlab

        parts = sorting.sort(values, ("swanlab",))
        texts = {name: swanlab.Text(text) for name, text in parts.texts.items()}
        numbers = {name: float(number) for name, number in parts.numbers.items()}
        self.run.log({**numbers, **texts, **parts.natives}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images.

        Args:
            values: By name, images: arrays of shape (H, W) or (H, W, C), or PIL images.
            step: Number of the step.
            **kwargs: Passed to `run.log`.
        """
        import swanlab

        for name, images in values.items():
            self.log({name: [swanlab.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run; a second call does nothing."""
        if self.run is not None and not self._finished:
            self._finished = True
            self.run.finish()

    @on_main_process
    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"id": self.run.id} if self.run is not None else {}

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a run by its id.

        Args:
            state: `id` of the run.
        """
        if "id" not in state:
            return
        self.init_kwargs = {**self.init_kwargs, "id": state["id"], "resume": "allow"}
        if self.run is not None and self.run.id != state["id"]:
            self.finish()
            self.start()
