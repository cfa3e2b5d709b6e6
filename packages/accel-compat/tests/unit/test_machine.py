"""Processors, GPUs and drivers as the machine shows them."""

import os
import socket

import pytest
import torch

from accel_core.errors import DeviceUnavailableError
from accel_core.host.environ import patch_environment
from accel_core.host.ports import get_free_port
from accelerate import _machine

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a CUDA device")


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Put a program called nvidia-smi on the PATH and return how to say what it does."""

    def answer(commands):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{commands}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
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
        found = _machine.get_cpu_distributed_information()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == expected


def test_imported_libraries():
    """Only modules that this process imported are named."""
    assert _machine.are_libraries_initialized("torch", "no_such_module") == ["torch"]


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
    lines = "\\n".join(names)
    driver(
        f'case "$1" in --query-gpu=name) printf "{lines}\\n";; --query-gpu=driver_version) printf "{version}\\n";; esac'
    )
    assert _machine.get_gpu_info() == (names, len(names))
    assert _machine.get_driver_version() == version
    assert _machine.check_cuda_p2p_ib_support() is expected


def test_a_driver_that_sees_no_gpu(driver):
    """In a container without one, nvidia-smi ends with another status than 0, which is told, and no error of P2P."""
    driver("echo No devices were found\nexit 6")
    with pytest.raises(DeviceUnavailableError, match="nvidia-smi says: No devices were found"):
        _machine.get_gpu_info()
    assert _machine.check_cuda_p2p_ib_support()


@NO_GPU
def test_a_machine_without_a_driver(monkeypatch):
    """Questions about NVIDIA GPUs are refused where there is no driver; several GPUs are then no problem."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DeviceUnavailableError, match="nvidia-smi is not on the PATH"):
        _machine.get_gpu_info()
    with pytest.raises(DeviceUnavailableError, match="nvidia-smi is not on the PATH"):
        _machine.get_driver_version()
    with pytest.raises(DeviceUnavailableError, match="CUDA device"):
        _machine.check_cuda_fp8_capability()
    assert _machine.check_cuda_p2p_ib_support()
    assert _machine.get_current_device_type() == ("cuda", "MULTI_GPU")


def test_a_port_that_somebody_listens_on_is_in_use():
    """The port is asked for by number, by text, or as MASTER_PORT."""
    port = get_free_port()
    assert not _machine.is_port_in_use(port)
    with socket.create_server(("localhost", port)):
        assert _machine.is_port_in_use(port)
        assert _machine.is_port_in_use(str(port))
        with patch_environment(MASTER_PORT=port):
            assert _machine.is_port_in_use()
