"""Batches go to the device that was asked for."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from streams import Stream
from torch.utils.data import DataLoader

from accel_core.data.prepare import prepare_data_loader
from accel_core.data.transfer import _overlapped, placed

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.mark.parametrize("kwargs", [{}, {"dispatch_batches": False}, {"non_blocking": True}])
@pytest.mark.parametrize("data", [range(5), Stream(5)], ids=["map", "stream"])
def test_every_batch_is_moved(data, kwargs):
    """Each tensor of each batch lies on the device, the filled-up last one included."""
    loader = prepare_data_loader(
        DataLoader(data, batch_size=2, collate_fn=lambda rows: {"x": torch.tensor(rows), "name": "rows"}),
        torch.device("meta"),
        2,
        0,
        put_on_device=True,
        **{"dispatch_batches": False, **kwargs},
    )
    batches = list(loader)
    assert [batch["x"].device.type for batch in batches] == ["meta"] * 2
    assert [tuple(batch["x"].shape) for batch in batches] == [(2,), (2,)]
    assert batches[0]["name"] == "rows"


def test_left_where_they_are():
    """Without a device, and on the CPU of a machine that has no other, batches are not touched."""
    batches = iter([torch.ones(1)])
    assert placed(batches, None) is batches
    if not torch.accelerator.is_available():
        assert placed(batches, torch.device("cpu")) is batches


def test_not_put_on_the_device():
    """A loader prepared without put_on_device leaves batches on the host."""
    loader = prepare_data_loader(DataLoader(range(4)), torch.device("meta"), 1, 0)
    assert {batch.device.type for batch in loader} == {"cpu"}


def test_copies_to_the_host_are_waited_for(monkeypatch):
    """A batch that comes from a device is there when it is given, also with non_blocking."""
    asked = []

    class Remote:
        def to(self, device, non_blocking=False):
            asked.append(non_blocking)
            return self

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    next(placed(iter([Remote()]), torch.device("cpu"), overlapped=True))
    assert asked == [False]


def test_copies_wait_for_readers_of_an_opaque_batch():
    """Memory of such a batch may be written to only behind what was queued when it was let go of."""
    seen = []

    class Graph:
        def to(self, device, non_blocking=False):
            seen.append("copy")
            return self

    side = SimpleNamespace(wait_stream=lambda other: seen.append(f"wait for {other.name}"), record_event=object)
    main = SimpleNamespace(name="computation", wait_event=lambda event: None)
    streams = SimpleNamespace(
        Stream=lambda device: side, stream=lambda chosen: contextlib.nullcontext(), current_stream=lambda device: main
    )
    seen.extend("step" for _ in _overlapped(iter([Graph() for _ in range(4)]), torch.device("cpu"), streams))
    waiting = ["wait for computation", "copy", "step"]
    assert seen == ["copy", "copy", "step", *waiting, *waiting, "step"]
