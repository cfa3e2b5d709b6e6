"""The real wandb library offline, read back from its own log file."""

import json
import struct

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import WandBTracker

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


class TestWandB(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = WandBTracker
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": "{folder}",
        "WANDB_SILENT": "true",
        "WANDB_CACHE_DIR": "{folder}",
    }

    def read(self, folder, state):
        """Read the history of both processes' files, and media by their paths."""
        import numpy as np
        import wandb
        from PIL import Image
        from wandb.proto import wandb_internal_pb2 as messages

        wandb.teardown()  # only then is every file written: the end of a run does not wait for it
        scalars, texts, images, config, table, artifact, ids = {}, {}, {}, {}, None, None, set()
        for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):  # named by their time
            ids.add(file.stem.removeprefix("run-"))
            for data in _records(file.read_bytes()):
                record = messages.Record.FromString(data)
                kind = record.WhichOneof("record_type")
                if kind == "run":
                    config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
                elif kind == "config":
                    config |= {item.key: json.loads(item.value_json) for item in record.config.update}
                elif kind == "artifact" and record.artifact.type == "file":
                    artifact = _artifact(record.artifact)
                elif kind == "history":
                    row = {}
                    for item in record.history.item:
                        *above, last = item.nested_key or [item.key]
                        place = row
                        for name in above:
                            place = place.setdefault(name, {})
                        place[last] = json.loads(item.value_json)
                    step = int(row.pop("_step"))
                    for name, value in row.items():
                        if isinstance(value, str):
                            texts.setdefault(name, []).append((step, value))
                        elif isinstance(value, dict) and value["_type"].startswith("images"):
                            pixels = [
                                np.asarray(Image.open(file.parent / "files" / path)) for path in value["filenames"]
                            ]
                            images.setdefault(name, []).extend((step, found) for found in pixels)
                        elif isinstance(value, dict) and value["_type"] == "table-file":
                            found = json.loads((file.parent / "files" / value["path"]).read_text())
                            table = (found["columns"], found["data"])
                        elif not name.startswith("_"):
                            scalars.setdefault(name, []).append((step, value))
        return Stored(
            scalars=scalars,
            texts=texts,
            images=images,
            table=table,
            artifact=artifact,
            config=config,
            runs=len(ids),
        )


def _artifact(record):
    (entry,) = record.manifest.contents
    with open(entry.local_path, "rb") as file:
        return file.read()
