"""Comet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accel_core.tracking.tracker import on_main_process
from accel_trackers import values as sorting
from accel_trackers.run import WriterTracker
from accel_trackers.tables import Table, TableTracker


class CometMLTracker(TableTracker, WriterTracker):
    """Logs to an experiment of Comet.

    Args:
        run_name: The project.
        **kwargs: Passed to `comet_ml.start`.

    Attributes:
        writer: The experiment, once started.
    """

    name = "comet_ml"
    requires_logging_directory = False
    libraries = ("comet_ml",)

    @on_main_process
    def start(self) -> None:
        """Open the experiment."""
        import comet_ml

        self.writer = comet_ml.start(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters."""
        self.writer.log_parameters(sorting.config_table(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log numbers as metrics; texts as the experiment's others, and in its text tab with their step.

        Mappings of numbers are metrics too, and anything else is logged as its text.
        """
        if step is not None:
            self.writer.set_step(step)
        parts = sorting.sort(values, groups=True)
        for name, number in parts.numbers.items():
            self.writer.log_metric(name, number, step=step, **kwargs)
        for name, text in parts.texts.items():
            self.writer.log_other(name, text, **kwargs)
            self.writer.log_text(text, step=step, metadata={"name": name})
        for name, group in parts.groups.items():
            self.writer.log_metrics({f"{name}/{key}": number for key, number in group.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log lists of images: arrays of shape (H, W) or (H, W, C), or PIL images."""
        for name, images in values.items():
            for index, image in enumerate(images):
                label = name if len(images) == 1 else f"{name}/{index}"
                self.writer.log_image(_picture(image), name=label, step=step, **kwargs)

    def _log_table(self, name: str, table: Table, step: int | None, **kwargs: object) -> None:
        """Log a table as a file of comma-separated values, `<name>-<step>.csv`."""
        names, rows = table.read()
        file = f"{name}.csv" if step is None else f"{name}-{step}.csv"
        self.writer.log_table(file, tabular_data=rows, headers=names, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the experiment."""
        self.writer.log_asset(local_path, file_name=artifact_path or os.path.basename(local_path), copy_to_tmp=True)

    @on_main_process
    def finish(self) -> None:
        """Close the experiment; a second call does nothing."""
        if self.writer is not None:
            self.writer.end()

    @on_main_process
    def state_dict(self) -> dict[str, Any]:
        """Return the experiment's key."""
        return {"key": self.writer.get_key()} if self.writer is not None else {}

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an experiment by its key."""
        if "key" not in state:
            return
        self.init_kwargs = {**self.init_kwargs, "experiment_key": state["key"], "mode": "get_or_create"}
        if self.writer is not None and self.writer.get_key() != state["key"]:
            self.writer.end()
            self.start()


def _picture(image: Any) -> object:
    """Turn an array of bytes into a PIL image, which Comet keeps as it is; arrays it scales."""
    if type(image).__module__ == "numpy" and image.dtype.name == "uint8":
        from PIL import Image

        return Image.fromarray(image)
    return image
