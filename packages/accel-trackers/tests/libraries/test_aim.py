"""The real Aim library, read back with its own reader."""

import io
import struct
from pathlib import Path
from urllib.parse import unquote, urlparse

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import AimTracker


class TestAim(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = AimTracker
    environment = {"HOME": "{folder}"}

    def arguments(self, folder):
        """Watch no hardware and no terminal."""
        return {"log_system_params": False, "system_tracking_interval": None, "capture_terminal_logs": False}

    def image_arguments(self):
        """Keep pixels as they are."""
        return {"kwargs": {"aim_image": {"format": "png"}}}

    def read(self, folder, state):
        """Read the configuration with `aim.Repo`, and the sequences from Aim's key-value files."""
        import numpy as np
        from aim import Repo
        from PIL import Image

        repo = Repo(str(folder))
        runs = repo.list_all_runs()
        meta = repo.request_tree("meta", state["hash"], read_only=True).collect()["meta"]
        stored = meta["chunks"][state["hash"]]
        rows = _rows(folder / ".aim" / "seqs" / "chunks" / state["hash"])
        found = {name: [] for names in stored["traces"].values() for name in names}
        for name, series in found.items():
            marker = b"\xfe" + name.encode() + b"\xfe"
            steps = {}
            for key, value in rows.items():
                *_, part = key.split(marker, 1)
                column, _, index = part.partition(b"\xfe\xfe")
                if marker in key and column == b"step":
                    steps[index] = _value(value)
                elif marker in key and column == b"val" and key.startswith(b"BLOBS"):
                    series.append((int.from_bytes(index[:8], "big"), _value(value)))
            for key, value in rows.items():
                *_, part = key.split(marker, 1)
                column, _, index = part.partition(b"\xfe\xfe")
                if marker in key and column == b"val" and index in steps:
                    series.append((steps[index], _value(value)))
            series.sort(key=lambda item: item[0])
        artifact = stored["artifacts"]["artifact.bin"]
        return Stored(
            scalars={
                name: series for name, series in found.items() if series and isinstance(series[0][1], int | float)
            },
            texts={name: series for name, series in found.items() if series and isinstance(series[0][1], str)},
            images={
                name: [(step, np.asarray(Image.open(io.BytesIO(data)))) for step, data in series]
                for name, series in found.items()
                if series and isinstance(series[0][1], bytes)
            },
            config=meta["attrs"]["hparams"],
            artifact=Path(unquote(urlparse(artifact.uri).path)).read_bytes(),
            runs=len(runs),
        )


def _rows(place):
    """Read all keys and values of one of Aim's RocksDB folders."""
    import aimrocks

    rows = aimrocks.DB(str(place), aimrocks.Options(create_if_missing=False), read_only=True).iteritems()
    rows.seek_to_first()
    return dict(rows)


def _value(data):
    """Read Aim's notation of a value: a byte for its type, then the value."""
    kind, rest = data[0], data[1:]
    if kind == 2:
        return struct.unpack("<q", rest)[0]
    if kind == 3:
        return struct.unpack("<d", rest)[0]
    return rest.decode() if kind == 4 else rest
