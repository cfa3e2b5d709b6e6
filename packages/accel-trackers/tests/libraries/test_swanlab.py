"""The real SwanLab library offline, read back from its own log file."""

import struct

import pytest

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import SwanLabTracker

_BLOCK = 32768


def _records(data):
    """Give the records of a log file: LevelDB's format with a header of seven bytes."""
    place, parts = 7, []
    while place + 7 <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if not kind:
            break
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


@pytest.mark.full("another case of a grid")
class TestSwanLab(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = SwanLabTracker
    environment = {"SWANLAB_MODE": "offline", "HOME": "{folder}"}

    def arguments(self, folder):
        """Write below the session's folder."""
        return {"log_dir": str(folder / "swan"), "mode": "offline"}

    def read(self, folder, state):
        """Read the records of both processes, media by their names, and the configuration."""
        import numpy as np
        import yaml
        from PIL import Image
        from swanlab.proto.swanlab.record.v1 import record_pb2

        scalars, texts, images, config, ids = {}, {}, {}, {}, set()
        for run in sorted((folder / "swan").glob("run-*"), key=lambda path: path.stat().st_mtime):
            config |= yaml.safe_load((run / "files" / "config.yaml").read_text())
            (file,) = run.glob("run-*.swanlab")
            for data in _records(file.read_bytes()):
                record = record_pb2.Record.FromString(data)
                kind = record.WhichOneof("record_type")
                if kind == "start":
                    ids.add(record.start.id)
                elif kind == "scalar":
                    found = record.scalar
                    scalars.setdefault(found.key, []).append((found.step, found.value.number))
                elif kind == "media":
                    found = record.media
                    for item in found.value.items:
                        if item.filename.endswith(".txt"):
                            text = (run / "media" / "text" / item.filename).read_text()
                            texts.setdefault(found.key, []).append((found.step, text))
                        else:
                            pixels = np.asarray(Image.open(run / "media" / "image" / item.filename))
                            images.setdefault(found.key, []).append((found.step, pixels))
        shown = {name: item["value"] for name, item in config.items()}
        return Stored(
            scalars=scalars,
            texts=texts,
            images=images,
            config=shown,
            runs=len(ids),
        )
