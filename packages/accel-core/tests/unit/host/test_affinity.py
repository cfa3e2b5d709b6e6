"""Processors, GPUs and drivers as the machine shows them."""

import os
import stat

import pytest
import torch

from accel_core.errors import DeviceUnavailableError
from accel_core.host import affinity
from accel_core.host.environ import patch_environment

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a CUDA device")


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Put a program that answers like nvidia-smi on the PATH and return how to set its answers."""

    def answer(names, version):
        program = tmp_path / "nvidia-smi"
        lines = "\\n".join(names)
        program.write_text(
            "#!/bin/sh\n"
            f'case "$1" in --query-gpu=name) printf "{lines}\\n";; '
            f'--query-gpu=driver_version) printf "{version}\\n";; esac\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return answer


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 0, 1)),
        ({"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}, (2, 3, 2, 3)),
    ],
)
def test_place_among_processes(variables, expected):
    """The place comes from whichever launcher set its variables."""
    with patch_environment(**variables):
        found = affinity.get_cpu_distributed_information()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == expected


def test_imported_libraries():
    """Only modules that this process imported are named."""
    assert affinity.are_libraries_initialized("torch", "no_such_module") == ["torch"]


@pytest.mark.parametrize(
    ("names", "version", "expected"),
    [
        (["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"], "535.86.10", False),
        (["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"], "550.54.14", True),
        (["NVIDIA GeForce RTX 4090"], "535.86.10", True),
        (["NVIDIA A100", "NVIDIA A100"], "470.82.01", True),
    ],
)
def test_cards_that_cannot_talk_to_each_other(driver, names, version, expected):
    """Several 4000-series cards need a recent driver; all others are fine."""
    driver(names, version)
    assert affinity.get_gpu_info() == (names, len(names))
    assert affinity.get_driver_version() == version
    assert affinity.check_cuda_p2p_ib_support() is expected


@NO_GPU
def test_a_machine_without_a_driver(monkeypatch):
    """Questions about NVIDIA GPUs are refused where there is no driver; several GPUs are then no problem."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DeviceUnavailableError, match="nvidia-smi is not on the PATH"):
        affinity.get_gpu_info()
    with pytest.raises(DeviceUnavailableError, match="nvidia-smi is not on the PATH"):
        affinity.get_driver_version()
    with pytest.raises(DeviceUnavailableError, match="CUDA device"):
        affinity.check_cuda_fp8_capability()
    assert affinity.check_cuda_p2p_ib_support()
    assert affinity.get_current_device_type() == ("cuda", "MULTI_GPU")


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
