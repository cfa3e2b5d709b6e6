"""The real Trackio library, read back from its SQLite tables."""

import json
import sqlite3

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import TrackioTracker


class TestTrackio(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = TrackioTracker
    environment = {"TRACKIO_DIR": "{folder}/trackio"}

    def arguments(self, folder):
        """Watch no hardware."""
        return {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}

    def read(self, folder, state):
        """Read the tables."""
        import numpy as np
        from PIL import Image

        scalars, texts, images, table = {}, {}, {}, None
        with sqlite3.connect(folder / "trackio" / "project.db") as tables:
            rows = tables.execute("select step, metrics, run_name from metrics order by id").fetchall()
            ((config,),) = tables.execute("select config from configs").fetchall()
        for step, blob, _ in rows:
            for name, value in json.loads(blob).items():
                if isinstance(value, str):
                    texts.setdefault(name, []).append((step, value))
                elif isinstance(value, dict) and value["_type"] == "trackio.image":
                    pixels = np.asarray(Image.open(folder / "trackio" / "media" / value["file_path"]).convert("RGB"))
                    images.setdefault(name, []).append((step, pixels))
                elif isinstance(value, dict) and value["_type"] == "trackio.table":
                    found = value["_value"]
                    table = (list(found[0]), [list(row.values()) for row in found])
                else:
                    scalars.setdefault(name, []).append((step, value))
        shown = json.loads(config)
        return Stored(
            scalars=scalars,
            texts=texts,
            images=images,
            table=table,
            config=shown,
            runs=len({name for *_, name in rows}),
        )
