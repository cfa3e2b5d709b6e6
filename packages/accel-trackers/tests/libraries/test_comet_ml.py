"""The real Comet library offline, read back from its archive."""

import io
import json
import zipfile
from typing import ClassVar

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import CometMLTracker


class TestComet(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = CometMLTracker
    resumes: ClassVar = False
    environment = {
        "COMET_OFFLINE_DIRECTORY": "{folder}/comet",
        "COMET_LOGGING_CONSOLE": "ERROR",
        "HOME": "{folder}",
    }

    def arguments(self, folder):
        """Stay offline."""
        return {"online": False, "api_key": "x" * 25}

    def read(self, folder, state):
        """Read the messages of the archive, and the files that they name."""
        import numpy as np
        from PIL import Image

        (archive,) = (folder / "comet").glob("*.zip")
        scalars, texts, config, files, images = {}, {}, {}, {}, {}
        with zipfile.ZipFile(archive) as whole:
            for line in whole.read("messages.json").decode().splitlines():
                message = json.loads(line)
                kind, content = message["type"], message["payload"]
                if kind == "metric_msg":
                    metric = content["metric"]
                    scalars.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
                elif kind == "parameter_msg" and content["param"]["source"] == "manual":
                    config[content["param"]["paramName"]] = content["param"]["paramValue"]
                elif kind == "file_upload":
                    named = content["additional_params"] or {}
                    data = whole.read(content["file_path"])
                    files[named.get("fileName")] = data
                    if content["upload_type"] == "visualization":
                        pixels = np.asarray(Image.open(io.BytesIO(data)))
                        images.setdefault(named["figName"], []).append((named["step"], pixels))
                    elif content["upload_type"] == "text-sample":
                        name = content["metadata"]["name"]
                        texts.setdefault(name, []).append((named["step"], data.decode()))
        header, *rows = files["results-4.csv"].decode().splitlines()
        table = (header.split(",")[-2:], [[row.split(",")[-2], int(row.split(",")[-1])] for row in rows])
        return Stored(
            scalars=scalars,
            texts=texts,
            config=config,
            images=images,
            table=table,
            artifact=files["artifact.bin"],
        )
