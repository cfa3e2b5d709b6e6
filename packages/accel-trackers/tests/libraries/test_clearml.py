"""The real ClearML library offline, read back from the folder of its offline task."""

import json
from pathlib import Path
from typing import ClassVar

import pytest

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import ClearMLTracker


@pytest.mark.full("another case of a grid")
class TestClearML(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = ClearMLTracker
    lossy_images: ClassVar = True
    resumes: ClassVar = False
    environment = {
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": "{folder}/clearml",
        "CLEARML_CONFIG_FILE": str(Path(__file__).with_name("clearml.conf")),
        "CLEARML_LOG_LEVEL": "ERROR",
        "HOME": "{folder}",
    }

    def arguments(self, folder):
        """Hook into nothing."""
        return {
            "task_name": "conformance",
            "auto_connect_frameworks": False,
            "auto_connect_arg_parser": False,
            "auto_connect_streams": False,
            "auto_resource_monitoring": False,
        }

    def images(self, name, pixels):
        """One image for a name."""
        return {name: pixels}

    def read(self, folder, state):
        """Read the events, the log and the task."""
        import numpy as np
        from PIL import Image

        (task,) = (folder / "clearml" / "offline").glob(f"{state['id']}/task.json")
        scalars, images, texts, table = {}, {}, {}, None
        for line in (task.parent / "metrics.jsonl").read_text().splitlines():
            for event in json.loads(line):
                name = event["metric"] if event["variant"] == "train" else f"{event['variant']}_{event['metric']}"
                if event["type"] == "training_stats_scalar":
                    scalars.setdefault(name, []).append((event["iter"], event["value"]))
                elif event["type"] == "training_debug_image":
                    images[name] = [(event["iter"], np.asarray(Image.open(event["url"])))]
                elif event["type"] == "plot":
                    found = json.loads(event["plot_str"])["data"][0]
                    columns = found["cells"]["values"]
                    table = (found["header"]["values"], [list(row) for row in zip(*columns, strict=True)])
        for line in (task.parent / "log.jsonl").read_text().splitlines():
            for event in json.loads(line):
                for text in event["msg"].splitlines():
                    place, _, said = text.partition(": ")
                    name, _, step = place.partition(" at step ")
                    if step.isdigit():
                        texts.setdefault(name, []).append((int(step), said))
        stored = json.loads(task.read_text())
        shown = {name: item["value"] for name, item in stored["hyperparams"]["General"].items()}
        (artifact,) = stored["execution"]["artifacts"]
        with open(artifact["uri"].removeprefix("file://"), "rb") as file:
            content = file.read()
        return Stored(
            scalars=scalars,
            texts=texts,
            images=images,
            table=table,
            artifact=content,
            config=shown,
        )
