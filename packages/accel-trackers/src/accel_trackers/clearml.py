"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accel_core.tracking.tracker import GeneralTracker, on_main_process
from accel_trackers import values as sorting
from accel_trackers.tables import Table, TableTracker

_SERIES = ("eval", "test", "train")


class ClearMLTracker(TableTracker, GeneralTracker):
    """Logs to a task of ClearML: the one that is open, or a new one.

    Args:
        run_name: The project.
        **kwargs: Passed to `Task.init`.

    Attributes:
        task: The task, once started.
    """

    name = "clearml"
    requires_logging_directory = False
    libraries = ("clearml",)

    @on_main_process
    def __init__(self, run_name: str | None = None, **kwargs: object) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self.init_kwargs: dict[str, Any] = kwargs
        self.task: Any = None
        self._ours = False

    @on_main_process
    def start(self) -> None:
        """Take the task that is open in this process, else open one."""
        from clearml import Task

        self.task = Task.current_task()
        self._ours = self.task is None
        if self._ours:
            project = {"project_name": self.user_provided_run_name} if self.user_provided_run_name else {}
            self.task = Task.init(**{**project, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """The task."""
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as hyperparameters."""
        self.task.connect(sorting.config_table(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Report numbers as scalars, or as single values without a step; texts, and all else as text, to the console.

        A name such as `eval_loss` becomes the series `eval` of the plot `loss`.
        """
        logger = self.task.get_logger()
        parts = sorting.sort(values)
        for name, number in parts.numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=number, **kwargs)
            else:
                title, series = _plot(name)
                logger.report_scalar(title=title, series=series, value=number, iteration=step, **kwargs)
        for name, text in parts.texts.items():
            place = f"{name}" if step is None else f"{name} at step {step}"
            logger.report_text(f"{place}: {text}", print_console=False)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Report images: arrays of shape (H, W) or (H, W, C), or PIL images."""
        logger = self.task.get_logger()
        for name, image in values.items():
            title, series = _plot(name)
            logger.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    def _log_table(self, name: str, table: Table, step: int | None, **kwargs: object) -> None:
        names, rows = (None, None) if table.dataframe is not None else table.read()
        plotted = table.dataframe if rows is None else [names, *rows]
        title, series = _plot(name)
        logger = self.task.get_logger()
        logger.report_table(title=title, series=series, table_plot=plotted, iteration=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a file or folder with the task."""
        name = artifact_path or os.path.basename(local_path)
        self.task.upload_artifact(name=name, artifact_object=local_path, wait_on_upload=True)

    @on_main_process
    def finish(self) -> None:
        """Close the task if it was opened here; a second call does nothing."""
        if self.task is not None and self._ours:
            self._ours = False
            self.task.close()

    @on_main_process
    def state_dict(self) -> dict[str, Any]:
        """Return the task's id."""
        return {"id": self.task.id} if self.task is not None else {}

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a task by its id; a task that was made offline has none on the server and is not continued."""
        if "id" not in state or str(state["id"]).startswith("offline-"):
            return
        self.init_kwargs = {**self.init_kwargs, "reuse_last_task_id": state["id"], "continue_last_task": 0}
        if self.task is not None and self._ours and self.task.id != state["id"]:
            self.task.close()
            self.start()


def _plot(name: str) -> tuple[str, str]:
    """Return the plot and the series that a name stands for."""
    prefix, _, rest = name.partition("_")
    return (rest, prefix) if prefix in _SERIES and rest else (name, "train")
