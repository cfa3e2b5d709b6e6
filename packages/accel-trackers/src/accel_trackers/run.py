"""What trackers have in common whose library gives one object to log to."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from accel_core.tracking.tracker import GeneralTracker, on_main_process
from accel_trackers.values import config_table


class WriterTracker(GeneralTracker):
    """A tracker that logs through one object of its library, its `writer`, which `start` makes."""

    @on_main_process
    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs: dict[str, Any] = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The writer, once started."""
        return self.writer

    @on_main_process
    def finish(self) -> None:
        """Close the writer; a second call does nothing."""
        if self.writer is not None:
            self.writer.close()


class RunTracker(GeneralTracker):
    """A tracker that logs to one run of its library, which has `init`, `Image` and a run with `log` and `finish`."""

    requires_logging_directory = False
    main_process_only = False
    key: ClassVar[str] = "id"

    @on_main_process
    def __init__(self, run_name: str, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs: dict[str, Any] = kwargs
        self.run: Any = None
        self._finished = False

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @property
    def _library(self) -> ModuleType:
        # By name, and only when a run needs it: importing one of these takes seconds.
        return importlib.import_module(self.libraries[0])

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        self.run = self._library.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as a table."""
        self.run.config.update(config_table(values))

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log lists of images."""
        for name, images in values.items():
            self.log({name: [self._library.Image(image) for image in images]}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run; a second call does nothing."""
        if self.run is not None and not self._finished:
            self._finished = True
            self.run.finish()

    def unused_folder(self) -> str | None:
        """Return the folder of an open run without logged values that is not shared; `None` for any other run."""
        return None

    @on_main_process
    def state_dict(self) -> dict[str, Any]:
        """Return the run's id or name."""
        return {self.key: getattr(self.run, self.key)} if self.run is not None else {}

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run by its id or name; of a run that was opened for nothing no folder stays."""
        if self.key not in state:
            return
        self.init_kwargs = {**self.init_kwargs, self.key: state[self.key], "resume": "allow"}
        if self.run is not None and self.state_dict() != {self.key: state[self.key]}:
            unused = self.unused_folder()
            self.finish()
            if unused is not None:
                shutil.rmtree(unused, ignore_errors=True)
            self._finished = False
            self.start()
