"""Trackio."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accel_core.tracking.tracker import on_main_process
from accel_trackers import values as sorting
from accel_trackers.run import RunTracker
from accel_trackers.tables import Table, TableTracker


class TrackioTracker(TableTracker, RunTracker):
    """Logs to a run of trackio.

    Args:
        run_name: The project.
        **kwargs: Passed to `trackio.init`.

    Attributes:
        run: The run, once started.
    """

    name = "trackio"
    libraries = ("trackio",)
    key = "name"
    _config: Mapping[str, Any] = MappingProxyType({})

    @on_main_process
    def start(self) -> None:
        """Open the run; one that takes the place of another gets its configuration."""
        super().start()
        if self._config:
            self.run.config.update(self._config)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as a table."""
        self._config = sorting.config_table(values)
        self.run.config.update(self._config)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log values at a step: numbers, texts, trackio's media; anything else as its text."""
        parts = sorting.sort(values, ("trackio", "pandas"))
        self.run.log({**parts.numbers, **parts.texts, **parts.natives}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log lists of images: arrays of shape (H, W, C), or PIL images."""
        import trackio

        for name, images in values.items():
            media = {name if len(images) == 1 else f"{name}/{i}": trackio.Image(im) for i, im in enumerate(images)}
            self.log(media, step=step, **kwargs)

    def _log_table(self, name: str, table: Table, step: int | None, **kwargs: object) -> None:
        import trackio

        frame: Any = table.dataframe
        if frame is None:
            names, rows = table.read()
            frame = importlib.import_module("pandas").DataFrame(rows, columns=names)
        self.log({name: trackio.Table(dataframe=frame)}, step=step, **kwargs)
