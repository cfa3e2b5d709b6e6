"""TensorBoard's real writer, read back with TensorBoard's own reader."""

import io
from pathlib import Path
from typing import ClassVar

import torch

from accel_testing.conformance.tracker import Stored, TrackerConformance
from accel_trackers import TensorBoardTracker


class TestTensorBoard(TrackerConformance):
    """The suite every tracker passes."""

    tracker_class = TensorBoardTracker
    rounds: ClassVar = torch.float32

    def images(self, name, pixels):
        """TensorBoard takes batches of arrays."""
        return {name: pixels[None]}

    def image_arguments(self):
        """With channels last."""
        return {"dataformats": "NHWC"}

    def read(self, folder, state):
        """Read the event files."""
        import numpy as np
        from PIL import Image
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams import plugin_data_pb2

        run = Path(folder, "project")
        events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
        events.Reload()
        session = EventAccumulator(str(min(run.glob("*/hparams.yml")).parent))
        session.Reload()
        content = session.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        table = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
        texts = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]
        return Stored(
            scalars={
                tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
            },
            texts={
                tag.removesuffix("/text_summary"): [
                    (event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)
                ]
                for tag in texts
            },
            images={
                tag: [
                    (event.step, np.asarray(Image.open(io.BytesIO(event.encoded_image_string))))
                    for event in events.Images(tag)
                ]
                for tag in events.Tags()["images"]
            },
            config={name: getattr(value, value.WhichOneof("kind")) for name, value in table.items()},
        )
