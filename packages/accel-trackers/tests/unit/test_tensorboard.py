"""Tests of the TensorBoard adapter with the real library, read back with its own reader."""

from pathlib import Path

import numpy as np
import pytest
import torch

from accel_core.tracking.hub import TrackerHub
from accel_testing import requires, world
from accel_trackers.tensorboard import TensorBoardTracker

pytestmark = requires("tensorboard")


def _read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    events.Reload()
    return events


def _texts(events, tag):
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"{tag}/text_summary")]


def test_scalars_and_text_through_the_hub(tmp_path):
    """Every number and text is in the event file at its step, exactly."""
    hub = TrackerHub("tensorboard", tmp_path)
    hub.init("project", {"lr": 0.5, "none": None, "nested": {"sizes": [1, 2]}, "dtype": torch.bfloat16})
    for step in range(20):
        hub.log({"loss": torch.tensor(step / 8), "note": f"step {step}"}, step=step)
    hub.log({"count": np.int64(3), "flag": True, "odd": [1, None]}, step=20)
    hub.finish()
    events = _read(tmp_path / "project")
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, step / 8) for step in range(20)]
    assert _texts(events, "note") == [(step, f"step {step}") for step in range(20)]
    assert events.Scalars("count")[0].value == 3
    assert events.Scalars("flag")[0].value == 1
    assert _texts(events, "odd/1") == [(20, "None")]
    (written,) = (tmp_path / "project").glob("*/hparams.yml")
    assert written.read_text() == 'dtype: "torch.bfloat16"\nlr: 0.5\nnested: {"sizes": [1, 2]}\nnone: null\n'


def test_hyperparameters_are_in_a_file_too(tmp_path):
    """`hparams.yml` lies where Accelerate writes it, and any reader of YAML gets the table back."""
    yaml = pytest.importorskip("yaml")
    simple = {"flag": True, "lr": 0.1, "n": 3, "name": "small", "nothing": None}
    odd = {"no": "yes", "a: b": "x # y", "text": "1e3", "empty": "", "lines": "a\nb", "rate": 1e-08, "big": 1e22}
    for run, config in (("simple", simple), ("odd", odd)):
        tracker = TensorBoardTracker(run, tmp_path)
        tracker.start()
        tracker.store_init_configuration(config)
        tracker.finish()
        (path,) = (tmp_path / run).glob("*/hparams.yml")
        assert float(path.parent.name) > 0
        read = yaml.safe_load(path.read_text())
        assert {name: value and type(config[name])(value) for name, value in read.items()} == config
    written = next((tmp_path / "simple").glob("*/hparams.yml")).read_text()
    assert written == yaml.dump(simple)


def test_several_curves(tmp_path):
    """A mapping of numbers becomes one chart with a curve for each."""
    hub = TrackerHub("tensorboard", tmp_path)
    hub.init("project")
    hub.log({"loss": {"train": 1.0, "test": 2.0}}, step=1)
    hub.finish()
    found = {
        folder.name: [event.value for event in _read(folder).Scalars("loss")]
        for folder in Path(tmp_path / "project").iterdir()
        if folder.is_dir()
    }
    assert found == {"loss_train": [1.0], "loss_test": [2.0]}


def test_writer_is_given(tmp_path):
    """`writer` and `tracker` are torch's writer, and arguments reach it."""
    from torch.utils.tensorboard import SummaryWriter

    hub = TrackerHub("tensorboard", tmp_path)
    hub.init("project", init_kwargs={"tensorboard": {"filename_suffix": ".mine"}})
    assert isinstance(hub.get("tensorboard").writer, SummaryWriter)
    assert isinstance(hub.get("tensorboard", unwrap=True), SummaryWriter)
    hub.finish()
    assert [path for path in (tmp_path / "project").iterdir() if path.name.endswith(".mine")]


@requires("tensorboardX")
@world(1)
def test_tensorboardx_serves_where_tensorboard_is_missing(tmp_path):
    """Without tensorboard, tensorboardX writes the same event files."""
    import sys

    sys.modules["torch.utils.tensorboard"] = None
    hub = TrackerHub("tensorboard", tmp_path)
    hub.init("project", {"lr": 0.5, "flag": True, "name": "small"})
    assert type(hub.get("tensorboard", unwrap=True)).__module__.startswith("tensorboardX")
    for step in range(5):
        hub.log({"loss": step / 4, "note": "x"}, step=step)
    hub.get("tensorboard").log_images({"picture": np.zeros((1, 3, 4, 5), dtype=np.uint8)}, step=3)
    hub.finish()
    events = _read(tmp_path / "project")
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, step / 4) for step in range(5)]
    assert [event.step for event in events.Images("picture")] == [3]
    (session,) = (tmp_path / "project").glob("*/hparams.yml")
    assert _read(session.parent).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
