"""TensorBoard, through torch's writer or tensorboardX."""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_core.tracking.tracker import on_main_process
from accel_trackers import values as sorting
from accel_trackers.run import WriterTracker

_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null|nan|inf|y)$)[a-z][a-z0-9_./]*", re.IGNORECASE)
"""Words that every YAML reader takes as text."""


class TensorBoardTracker(WriterTracker):
    """Writes event files below a folder.

    Args:
        run_name: Name of the run: the folder below `logging_dir`.
        logging_dir: Where the runs are.
        **kwargs: Passed to the `SummaryWriter`.

    Attributes:
        writer: The `SummaryWriter`, once started.
    """

    name = "tensorboard"
    requires_logging_directory = True
    fills_step = True
    libraries = ("tensorboard", "tensorboardX")

    @on_main_process
    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: object) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = os.path.join(os.fspath(logging_dir), run_name)

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        self.writer = _writer_class()(self.logging_dir, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters, in `<time>` below the run's folder, as Accelerate does.

        They are there as events, and in `hparams.yml`.
        """
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(_yaml(values), encoding="utf-8")
        summary = importlib.import_module(f"{type(self.writer).__module__.rpartition('.')[0]}.summary")
        with type(self.writer)(str(folder)) as session:
            for part in summary.hparams(sorting.config_table(values), {}):
                session.file_writer.add_summary(part)
        self.writer.flush()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Write numbers as scalars, texts as text and mappings of numbers as one chart of several curves.

        Anything else is written as its text.
        """
        parts = sorting.sort(values, groups=True)
        for tag, number in parts.numbers.items():
            self.writer.add_scalar(tag, float(number), global_step=step, **kwargs)
        for tag, text in parts.texts.items():
            self.writer.add_text(tag, text, global_step=step, **kwargs)
        for tag, group in parts.groups.items():
            self.writer.add_scalars(tag, group, global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Write images: arrays or tensors of shape (N, C, H, W), or as `dataformats` says."""
        for tag, images in values.items():
            self.writer.add_images(tag, images, global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the same folder; what lies after the stored step is dropped by TensorBoard when it reads."""
        if state.get("step", -1) >= 0:
            self.init_kwargs = {**self.init_kwargs, "purge_step": state["step"] + 1}
        if self.writer is not None:
            self.writer.close()
            self.start()


def _yaml(values: Mapping[str, Any]) -> str:
    """Write a mapping as YAML, a line a value; in JSON where a plain word could be read as something else."""
    lines = []
    for name, value in sorted((str(name), value) for name, value in values.items()):
        is_plain = isinstance(value, str) and _PLAIN.fullmatch(value)
        key = name if _PLAIN.fullmatch(name) else json.dumps(name)
        lines.append(f"{key}: {value if is_plain else json.dumps(value, default=str)}\n")
    return "".join(lines)


def _writer_class() -> Any:
    """Return torch's writer if tensorboard is installed, else tensorboardX's."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        return importlib.import_module("tensorboardX").SummaryWriter
