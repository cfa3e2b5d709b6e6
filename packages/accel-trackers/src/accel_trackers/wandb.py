"""Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

from accel_core.tracking.tracker import on_main_process
from accel_trackers import values as sorting
from accel_trackers.run import RunTracker
from accel_trackers.tables import Table, TableTracker

_NATIVE = ("PIL", "matplotlib", "numpy", "pandas", "plotly", "torch", "wandb")


class WandBTracker(TableTracker, RunTracker):
    """Logs to a run of wandb.

    Args:
        run_name: The project.
        **kwargs: Passed to `wandb.init`.

    Attributes:
        run: The run, once started.
    """

    name = "wandb"
    libraries = ("wandb",)
    _has_artifacts = False

    def unused_folder(self) -> str | None:
        """Return the folder of an offline run without a step or an artifact."""
        unused = self.run.offline and not self.run.step and not self._has_artifacts
        return str(self.run.settings.sync_dir) if unused else None

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as a table."""
        # A resumed run has these keys already.
        self.run.config.update(sorting.config_table(values), allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log values at a step: numbers, texts, wandb's media, arrays, figures; anything else as its text.

        wandb drops what comes for a step before its own; such values are logged at its own step, and the one asked
        for is stored as `accel/step`.
        """
        parts = sorting.sort(values, _NATIVE)
        row = {**parts.numbers, **parts.texts, **parts.natives}
        if step is not None and step < self.run.step:  # wandb drops steps that go back
            row, step = {**row, "accel/step": step}, None
        self.run.log(row, step=step, **kwargs)

    def _log_table(self, name: str, table: Table, step: int | None, **kwargs: object) -> None:
        import wandb

        self.log({name: wandb.Table(**table._asdict())}, step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the run."""
        import wandb

        artifact = wandb.Artifact(_artifact_name(artifact_path or os.path.basename(local_path)), type="file")
        artifact.add_file(local_path) if os.path.isfile(local_path) else artifact.add_dir(local_path)
        self.run.log_artifact(artifact)
        self._has_artifacts = True


def _artifact_name(name: str) -> str:
    # What wandb takes in names of artifacts.
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
