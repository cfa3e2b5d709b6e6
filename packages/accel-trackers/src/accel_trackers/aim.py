"""Aim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_core.tracking.tracker import on_main_process
from accel_trackers import values as sorting
from accel_trackers.run import WriterTracker


class AimTracker(WriterTracker):
    """Logs to a run of Aim.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of Aim's repository.
        **kwargs: Passed to `aim.Run`.

    Attributes:
        writer: The run, once started.
    """

    name = "aim"
    requires_logging_directory = True
    fills_step = True
    libraries = ("aim",)

    @on_main_process
    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: object) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = "." if logging_dir is None else os.fspath(logging_dir)

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        from aim import Run

        self.writer = Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as `hparams`."""
        self.writer["hparams"] = sorting.config_table(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log values at a step: numbers, texts, Aim's objects; anything else as its text."""
        from aim import Text

        parts = sorting.sort(values, ("aim",))
        for name, number in {**parts.numbers, **parts.natives}.items():
            self.writer.track(number, name=name, step=step, **kwargs)
        for name, text in parts.texts.items():
            self.writer.track(Text(text), name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log images: by name, an image, a list of images, or a pair of an image and its caption.

        `kwargs` has `aim_image` and `track`: arguments of `aim.Image` and of `Run.track`.
        """
        from aim import Image

        given = kwargs or {}
        for name, value in values.items():
            for image, caption in _captioned(value):
                made = Image(image, caption=caption, **given.get("aim_image", {}))
                self.writer.track(made, name=name, step=step, **given.get("track", {}))

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file with the run."""
        if self.writer.artifacts_uri is None:
            self.writer.set_artifacts_uri(Path(self.aim_repo_path, "aim-artifacts").absolute().as_uri())
        self.writer.log_artifact(local_path, name=artifact_path or os.path.basename(local_path))

    @on_main_process
    def state_dict(self) -> dict[str, Any]:
        """Return the run's hash."""
        return {"hash": self.writer.hash} if self.writer is not None else {}

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run by its hash."""
        if "hash" not in state:
            return
        self.init_kwargs = {**self.init_kwargs, "run_hash": state["hash"]}
        if self.writer is not None and self.writer.hash != state["hash"]:
            self.writer.close()
            self.start()


def _captioned(value: object) -> list[tuple[object, str]]:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return [(value[0], value[1])]
    return [(image, "") for image in value] if isinstance(value, list) else [(value, "")]
