"""The real DVCLive library without a repository, read back from its files."""

import csv

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import DVCLiveTracker


class TestDVCLive(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = DVCLiveTracker
    environment = {
        "DVC_NO_ANALYTICS": "1",
        "DVC_GLOBAL_CONFIG_DIR": "{folder}/dvc",
        "DVC_SITE_CACHE_DIR": "{folder}/dvc",
    }

    def arguments(self, folder):
        """Write below the session's folder and make no experiment, which needs a git repository."""
        return {"dir": str(folder / "live"), "save_dvc_exp": False}

    def read(self, folder, state):
        """Read the tables of metrics."""
        import numpy as np
        import yaml
        from PIL import Image

        live = folder / "live"
        scalars, texts = {}, {}
        for file in (live / "plots" / "metrics").rglob("*.tsv"):
            with open(file, newline="") as lines:
                rows = list(csv.DictReader(lines, delimiter="\t"))
            name = str(file.relative_to(live / "plots" / "metrics").with_suffix(""))
            for row in rows:
                *_, value = row.values()
                try:
                    scalars.setdefault(name, []).append((int(row["step"]), float(value)))
                except ValueError:
                    texts.setdefault(name, []).append((int(row["step"]), value))
        return Stored(
            scalars=scalars,
            texts=texts,
            config=yaml.safe_load((live / "params.yaml").read_text()),
            images={"picture": [(4, np.asarray(Image.open(live / "plots" / "images" / "picture-4.png")))]},
            artifact=(live / "artifacts" / "artifact.bin").read_bytes(),
        )
