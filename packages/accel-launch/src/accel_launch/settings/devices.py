"""Counts accelerators without torch, from what the driver shows in the file system."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from accel_core.options.enums import DistributedType
from accel_core.options.hardware import HARDWARE

__all__ = ["SEVERAL_DEVICES", "count_gpus", "visible_variable"]

_VISIBLE = {row.label.value: row.visible_variable for row in HARDWARE if row.name not in ("cpu", "mps", "xla")}
_GPU = DistributedType.MULTI_GPU.value

SEVERAL_DEVICES = tuple(sorted(_VISIBLE, key=lambda label: (label != _GPU, label)))
"""What a configuration file calls several devices of a kind, the most common kind first."""


def visible_variable(label: object) -> str:
    """Return the variable that says which devices a process sees."""
    return _VISIBLE.get(str(label)) or str(_VISIBLE[_GPU])


def count_gpus(environment: Mapping[str, str], gpu_ids: str | None = None) -> int:
    """Count the NVIDIA and AMD GPUs that processes started here would see."""
    present = _present()
    named = gpu_ids if gpu_ids not in (None, "", "all") else environment.get(visible_variable(_GPU))
    if named is None or present == 0:
        return present
    return len([word for word in named.split(",") if word.strip() and word.strip() != "-1"])


def _present() -> int:
    nvidia = Path("/proc/driver/nvidia/gpus")
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    nodes = Path("/sys/class/kfd/kfd/topology/nodes")
    if nodes.is_dir():
        return sum(_has_compute_units(node) for node in nodes.iterdir())
    # Windows' Linux, and containers without the driver's folder.
    if Path("/dev/dxg").exists() or list(Path("/dev").glob("nvidia[0-9]*")):
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return 0
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return 0


def _has_compute_units(node: Path) -> bool:
    try:
        properties = (node / "properties").read_text()
    except OSError:
        return False
    # CPUs are nodes too, without SIMD units.
    return any(line.startswith("simd_count ") and line.split()[1] != "0" for line in properties.splitlines())
