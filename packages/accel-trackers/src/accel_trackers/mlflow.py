"""MLflow."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from accel_core.host import environ
from accel_core.tracking.tracker import GeneralTracker, on_main_process
from accel_trackers import values as sorting
from accel_trackers.tables import Table, TableTracker

_LONGEST_NAME = 250
_LONGEST_VALUE = 6000
_MOST_PARAMS = 100
_MOST_METRICS = 1000


class MLflowTracker(TableTracker, GeneralTracker):
    """Logs to a run of MLflow.

    The run is the active one of the thread that called `init_trackers`, so MLflow's own functions write to it as well.

    Args:
        experiment_name: The experiment; MLFLOW_EXPERIMENT_NAME has priority.
        logging_dir: Where a new experiment keeps its artifacts.
        run_id: A run to go on with; MLFLOW_RUN_ID has priority.
        tags: Tags of the run, or their JSON; MLFLOW_TAGS has priority.
        nested_run: Whether the run is a child of the active one; MLFLOW_NESTED_RUN has priority.
        run_name: Name of a new run.
        description: Description of a new run.

    Attributes:
        active_run: The run, once started.
    """

    name = "mlflow"
    requires_logging_directory = False
    fills_step = True
    libraries = ("mlflow",)
    starts_on_caller = True

    @on_main_process
    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = environ.text("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id = environ.text("MLFLOW_RUN_ID") or run_id
        chosen = environ.text("MLFLOW_TAGS") or tags
        self.tags: dict[str, Any] | None = json.loads(chosen) if isinstance(chosen, str) else chosen
        self.nested_run = environ.flag("MLFLOW_NESTED_RUN", bool(nested_run))
        self.run_name = run_name
        self.description = description
        self.active_run: Any = None
        self._client: Any = None
        self._finished = False
        self._names: dict[str, str] = {}

    @on_main_process
    def start(self) -> None:
        """Make the experiment if it is new, and start the run."""
        import mlflow

        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment() if self.run_id is None else None,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )
        self._client = mlflow.MlflowClient()
        self._finished = False

    def _experiment(self) -> str | None:
        import mlflow

        if self.experiment_name is None:
            return None
        found = mlflow.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return str(found.experiment_id)
        return str(mlflow.create_experiment(self.experiment_name, artifact_location=self.logging_dir))

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.active_run

    @property
    def _run(self) -> str:
        return str(self.active_run.info.run_id)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters; long values are shortened, and what a resumed run has is kept."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run).data.params
        named = {self._name(path): str(value)[:_LONGEST_VALUE] for path, value in sorting.config_table(values).items()}
        params = [Param(name, value) for name, value in named.items() if name not in known]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + _MOST_PARAMS])

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log numbers as metrics, and texts, and the text of all else, as the artifacts `texts/<name>/<step>.txt`."""
        from mlflow.entities import Metric

        parts = sorting.sort(values)
        now = int(time.time() * 1000)
        metrics = [Metric(self._name(name), float(number), now, step or 0) for name, number in parts.numbers.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_METRICS], **kwargs)
        for name, text in parts.texts.items():
            self._client.log_text(self._run, text, f"texts/{self._name(name)}/{step or 0}.txt")

    def _name(self, name: str) -> str:
        """Return a name that MLflow accepts; different names stay different."""
        if name in self._names:
            return self._names[name]
        allowed = re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII)
        segments = ["_" if part.strip(".") == "" else part for part in allowed.split("/")]
        stem = "/".join(segments)[: _LONGEST_NAME - 5]
        taken = set(self._names.values())
        chosen = next(c for c in (stem, *(f"{stem}-{n}" for n in range(2, 10_000))) if c not in taken)
        self._names[name] = chosen
        if chosen != name:
            self._client.set_tag(self._run, f"accel.name.{chosen}"[:_LONGEST_NAME], name[:_LONGEST_VALUE])
        return chosen

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log lists of images: arrays of shape (H, W) or (H, W, C), or PIL images."""
        for name, images in values.items():
            for index, image in enumerate(images):
                key = self._name(name if len(images) == 1 else f"{name}/{index}")
                self._client.log_image(self._run, image, key=key, step=step, synchronous=True, **kwargs)

    def _log_table(self, name: str, table: Table, step: int | None, **_: object) -> None:
        """Log a table as the artifact `tables/<name>.json`, or `tables/<name>-<step>.json`."""
        names, rows = table.read()
        by_column = {column: [row[index] for row in rows] for index, column in enumerate(names)}
        stem = self._name(name) if step is None else f"{self._name(name)}-{step}"
        self._client.log_table(self._run, by_column, f"tables/{stem}.json")

    @on_main_process
    def log_figure(self, figure: object, artifact_file: str, **save_kwargs: object) -> None:
        """Log a figure of matplotlib or plotly."""
        self._client.log_figure(self._run, figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Log all files of a folder."""
        self._client.log_artifacts(self._run, local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file."""
        self._client.log_artifact(self._run, local_path, artifact_path)

    @on_main_process
    def finish(self) -> None:
        """End the run; a second call does nothing."""
        if self._client is not None and not self._finished:
            self._finished = True
            self._client.set_terminated(self._run)

    @on_main_process
    def release(self) -> None:
        """Detach the run from the calling thread."""
        import mlflow

        active = mlflow.active_run()
        if active is not None and self.active_run is not None and active.info.run_id == self._run:
            mlflow.end_run()

    @on_main_process
    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"run_id": self._run} if self.active_run is not None else {}

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run by its id; a run that was opened for nothing is removed."""
        if "run_id" not in state:
            return
        self.run_id = state["run_id"]
        if self.active_run is not None and self._run != self.run_id:
            opened = self._run
            self._client.set_terminated(opened)
            self._client.update_run(self.run_id, status="RUNNING")
            self.active_run = self._client.get_run(self.run_id)
            self._client.delete_run(opened)
