"""Processors, GPUs and drivers as the machine shows them."""

import os

import pytest
import torch

from accel_core.host import affinity

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a CUDA device")


@NO_GPU
def test_affinity_without_a_gpu_stays():
    """Without a GPU the process keeps its processors."""
    before = os.sched_getaffinity(0)
    affinity.set_numa_affinity(0)
    affinity.override_numa_affinity(0, verbose=True)
    assert os.sched_getaffinity(0) == before


def test_affinity_follows_the_gpu(monkeypatch, tmp_path):
    """With a GPU the process runs on the processors that Linux lists beside the card."""
    before = os.sched_getaffinity(0)
    chosen = min(before)

    class Card:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0

    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text(f"{chosen}\n")
    monkeypatch.setattr(affinity.availability, "is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card)
    monkeypatch.setattr(affinity, "Path", lambda _, *parts: tmp_path.joinpath(*parts))
    try:
        affinity.override_numa_affinity(0)
        assert os.sched_getaffinity(0) == {chosen}
    finally:
        os.sched_setaffinity(0, before)


def test_processor_lists():
    """Ranges and single processors are read as Linux writes them."""
    assert affinity.parse_processors("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert affinity.parse_processors("\n") == set()
