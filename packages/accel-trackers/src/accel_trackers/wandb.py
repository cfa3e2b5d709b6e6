"""Weights & Biases."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from accel_core.tracking.tracker import GeneralTracker, on_main_process
from accel_trackers import values as sorting

__all__ = ["WandBTracker"]

_NATIVE = ("PIL", "matplotlib", "numpy", "pandas", "plotly", "torch", "wandb")


class WandBTracker(GeneralTracker):
    """Logs to a run of wandb.

    Args:
        run_name: The project.
        **kwargs: Passed to `wandb.init`.

    Attributes:
        run: The run, once started.
    """

    name = "wandb"
    requires_logging_directory = False
    main_process_only = False
    libraries = ("wandb",)

    @on_main_process
    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        import wandb

        self.run = wandb.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration, nested as it is where wandb can show it, and exactly under `accel_config`.

        Args:
            values: Any nesting of anything.
        """
        table, document = sorting.config_table(values)
        self.run.config.update({**table, "accel_config": json.dumps(document)}, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values at a step.

        wandb drops what comes for a step before its own; such values are logged at its own step, with the one asked
        for beside them under `accel/step`.

        Args:
            values: By name: numbers, texts, wandb's media, arrays, figures; anything else as its text.
            step: Number of the step.
            **kwargs: Passed to `run.log`.
        """
        parts = sorting.sort(values, _NATIVE)
        row = {**parts.numbers, **parts.texts, **parts.natives}
        if step is not None and step < self.run.step:
            row, step = {**row, "accel/step": step}, None
        self.run.log(row, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images.

        Args:
            values: By name, images: arrays of shape (H, W) or (H, W, C), or PIL images.
            step: Number of the step.
            **kwargs: Passed to `run.log`.
        """
        import wandb

        for name, images in values.items():
            self.log({name: [wandb.Image(image) for image in images]}, step=step, **kwargs)

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
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the run.

        Args:
            local_path: The file.
            artifact_path: Name of the artifact; the file's by default.
        """
        import wandb

        artifact = wandb.Artifact(_artifact_name(artifact_path or os.path.basename(local_path)), type="file")
        artifact.add_file(local_path) if os.path.isfile(local_path) else artifact.add_dir(local_path)
        self.run.log_artifact(artifact)

    @on_main_process
    def finish(self) -> None:
        """Close the run; a second call does nothing."""
        if self.run is not None:
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
            self.run.finish()
            self.start()


def _artifact_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
