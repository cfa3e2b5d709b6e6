"""The real MLflow library with its SQLite store, read back from the tables and the artifact folder."""

import json
import sqlite3
from pathlib import Path

import pytest

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import MLflowTracker


class TestMLflow(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = MLflowTracker
    environment = {"MLFLOW_TRACKING_URI": "sqlite:///{folder}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def arguments(self, folder):
        """Keep artifacts below the session's folder."""
        return {"logging_dir": str(folder / "artifacts"), "run_name": "conformance", "tags": '{"kind": "test"}'}

    def read(self, folder, state):
        """Read the tables."""
        import numpy as np
        from PIL import Image

        with sqlite3.connect(folder / "mlflow.db") as tables:
            scalars = {}
            rows = tables.execute(
                "select key, step, value from metrics where run_uuid = ? order by step", (state["run_id"],)
            )
            for name, step, value in rows:
                scalars.setdefault(name, []).append((step, value))
            config = dict(tables.execute("select key, value from params where run_uuid = ?", (state["run_id"],)))
            runs = tables.execute("select status, name from runs where lifecycle_stage = 'active'").fetchall()
            assert runs == [("FINISHED", "conformance")]
            asked = "select value from tags where key = 'kind' and run_uuid = ?"
            kind = tables.execute(asked, (state["run_id"],)).fetchall()
            assert kind == [("test",)]
        place = next(Path(folder, "artifacts").glob(f"{state['run_id']}/artifacts"))
        texts = {
            named.name: sorted((int(file.stem), file.read_text()) for file in named.glob("*.txt"))
            for named in (place / "texts").iterdir()
        }
        image = next((place / "images").glob("picture?step?4?*.png"))
        table = json.loads((place / "tables" / "results-4.json").read_text())
        return Stored(
            scalars=scalars,
            config=config,
            texts=texts,
            images={"picture": [(4, np.asarray(Image.open(image)))]},
            table=(table["columns"], table["data"]),
            artifact=(place / "artifact.bin").read_bytes(),
            runs=len(runs),
        )


def test_variables_that_are_set_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not set: with an empty id, MLflow began another run, in the default experiment."""
    for name in ("EXPERIMENT_NAME", "RUN_ID", "TAGS"):
        monkeypatch.setenv(f"MLFLOW_{name}", "")
    tracker = MLflowTracker("digits", tags='{"kind": "test"}')
    assert (tracker.experiment_name, tracker.run_id, tracker.tags) == ("digits", None, {"kind": "test"})
