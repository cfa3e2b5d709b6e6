"""Trackio."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from accel_core.tracking.tracker import GeneralTracker, on_main_process
from accel_trackers import values as sorting

__all__ = ["TrackioTracker"]


class TrackioTracker(GeneralTracker):
    """Logs to a run of trackio.

    Args:
        run_name: The project.
        **kwargs: Passed to `trackio.init`.

    Attributes:
        run: The run, once started.
    """

    name = "trackio"
    requires_logging_directory = False
    main_process_only = False
    libraries = ("trackio",)

    @on_main_process
    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None
        self._finished = False
        self._config: dict[str, Any] = {}

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        import trackio

        self.run = trackio.init(project=self.run_name, **self.init_kwargs)
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
        self._config = {**table, "accel_config": json.dumps(document)}
        self.run.config.update(self._config)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values at a step.

        Args:
            values: By name: numbers, texts, trackio's media; anything else as its text.
            step: Number of the step.
            **kwargs: Passed to `run.log`.
        """
        parts = sorting.sort(values, ("trackio", "pandas"))
        self.run.log({**parts.numbers, **parts.texts, **parts.natives}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images.

        Args:
            values: By name, images: arrays of shape (H, W, C), or PIL images.
            step: Number of the step.
            **kwargs: Passed to `run.log`.
        """
        import trackio

        for name, images in values.items():
            media = {name if len(images) == 1 else f"{name}/{i}": trackio.Image(im) for i, im in enumerate(images)}
            self.log(media, step=step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table.

        Args:
            table_name: Its name.
            columns: Names of the columns.
            data: The rows.
            dataframe: A data frame instead of both.
            step: Number of the step.
            **kwargs: Passed to `run.log`.
        """
        import trackio

        if dataframe is None:
            names, table = sorting.rows(columns, data, None)
            dataframe = importlib.import_module("pandas").DataFrame(table, columns=names)
        self.log({table_name: trackio.Table(dataframe=dataframe)}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run; a second call does nothing."""
        if self.run is not None and not self._finished:
            self._finished = True
            self.run.finish()

    @on_main_process
    def state_dict(self) -> dict[str, Any]:
        """Return the run's name, by which trackio resumes."""
        return {"name": self.run.name} if self.run is not None else {}

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a run by its name.

        Args:
            state: `name` of the run.
        """
        if "name" not in state:
            return
        self.init_kwargs = {**self.init_kwargs, "name": state["name"], "resume": "allow"}
        if self.run is not None and self.run.name != state["name"]:
            self.finish()
            self.start()
            self.run.config.update(self._config)
