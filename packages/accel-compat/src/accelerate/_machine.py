"""What Accelerate tells of the machine, of a process's place on it and of sizes, and accel itself does not ask."""

from __future__ import annotations

import importlib
import shutil
import socket
import subprocess
import sys

from accel_core._records import record
from accel_core.errors import DeviceUnavailableError
from accel_core.host import availability, environ
from accelerate import _availability
from accelerate._environment import get_int_from_env

USUAL_PORT = 29500

_FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


_P2P_DRIVER = (550, 40, 7)  # the first with which GeForce cards of the 4000 series talk to each other


_LABELS = (
    ("mlu", "MULTI_MLU", _availability.is_mlu_available),  # in Accelerate's order; the first that is here counts
    ("sdaa", "MULTI_SDAA", _availability.is_sdaa_available),
    ("musa", "MULTI_MUSA", _availability.is_musa_available),
    ("npu", "MULTI_NPU", _availability.is_npu_available),
    ("hpu", "MULTI_HPU", availability.is_hpu_available),
    ("xpu", "MULTI_XPU", _availability.is_xpu_available),
    ("neuron", "MULTI_NEURON", _availability.is_neuron_available),
)


_RANK_VARIABLES = {
    # Of torchrun, Intel's MPI, Open MPI and MVAPICH.
    "rank": ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "world_size": ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "local_rank": ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "local_world_size": (
        "LOCAL_WORLD_SIZE",
        "MPI_LOCALNRANKS",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
}


@record
class CPUInformation:
    """Where this process stands among those that a launcher started."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Read this process's place from the variables of torchrun, MPI or PMI."""
    return CPUInformation(
        rank=get_int_from_env(_RANK_VARIABLES["rank"], 0),
        world_size=get_int_from_env(_RANK_VARIABLES["world_size"], 1),
        local_rank=get_int_from_env(_RANK_VARIABLES["local_rank"], 0),
        local_world_size=get_int_from_env(_RANK_VARIABLES["local_world_size"], 1),
    )


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the modules named that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of accelerator of this machine and the label of a run over several of them."""
    for device, label, is_here in _LABELS:
        if is_here():
            return device, label
    return "cuda", "MULTI_GPU"


def _nvidia_smi(query: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    words = [str(program), query, "--format=csv,noheader"]
    done = None if program is None else subprocess.run(words, capture_output=True, text=True, check=False)
    if done is None or done.returncode:  # it ends with a status of its own where it sees no GPU
        said = "is not on the PATH" if done is None else f"says: {' '.join((done.stdout + done.stderr).split())}"
        raise DeviceUnavailableError(
            f"NVIDIA GPUs cannot be queried; nvidia-smi {said}. Install the NVIDIA driver, or run this where one is."
        )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def get_gpu_info() -> tuple[list[str], int]:
    """Ask the NVIDIA driver for the GPUs of this machine.

    Raises:
        DeviceUnavailableError: There is no NVIDIA driver, or it sees no GPU.
    """
    names = _nvidia_smi("--query-gpu=name")
    return names, len(names)


def get_driver_version() -> str:
    """Ask the NVIDIA driver for its version, such as `550.54.14`.

    Raises:
        DeviceUnavailableError: There is no NVIDIA driver, or it sees no GPU.
    """
    return _nvidia_smi("--query-gpu=driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether several GPUs here can talk to each other directly."""
    try:
        names, count = get_gpu_info()
    except DeviceUnavailableError:  # then nothing says otherwise
        return True
    if count < 2 or not any("RTX 40" in name for name in names):  # one GPU has nobody to talk to
        return True
    driver = tuple(int(part) for part in get_driver_version().split(".") if part.isdigit())
    return driver >= _P2P_DRIVER


def check_cuda_fp8_capability() -> bool:
    """Return whether the current CUDA device computes in 8-bit floating point (compute capability 8.9 or higher).

    Raises:
        DeviceUnavailableError: There is no CUDA device.
    """
    if not availability.is_cuda_available():
        raise DeviceUnavailableError(
            "The ability to compute in fp8 belongs to a CUDA device; none is available. "
            "Run this on a machine with one, or choose another precision."
        )
    capability: tuple[int, int] = importlib.import_module("torch").cuda.get_device_capability()
    return capability >= _FP8_CAPABILITY


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether something listens on a port of this machine."""
    number = environ.integer("MASTER_PORT", USUAL_PORT) if port is None else int(port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", number or USUAL_PORT)) == 0


def convert_bytes(size: float) -> str:
    """Write a number of bytes in the largest unit in which it is at least one; units are multiples of 1,024.

    >>> convert_bytes(1500)
    '1.46 KB'
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"
