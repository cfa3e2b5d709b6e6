"""Disk space, shared memory and the limit of open files."""

import os
import resource
import shutil
import tempfile
from pathlib import Path

from accel_launch.settings.location import config_folder
from accel_verify.diagnosis.finding import DoctorFinding, ok, problem, warning

_DISK, _MEMORY, _FILES = "Disk space", "Shared memory", "Open files"
_GIB, _MIB = 2**30, 2**20
_FEW_FILES = 1024


def check_disks(checkpoints: Path) -> list[DoctorFinding]:
    """Examine the folders that a run writes to, by writing to them."""
    folders = {"checkpoints": checkpoints, "temporary files": Path(tempfile.gettempdir())}
    findings = []
    for name, folder in {**folders, "cache": config_folder().parent}.items():
        # A run creates missing folders.
        there = next((place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()), folder)
        remedy = f"Free space in {there}, correct its rights, or use another folder."
        findings.append(_written(_DISK, f"{name}: {folder}", there, remedy))
    return findings


def check_shared_memory(folder: Path = Path("/dev/shm")) -> list[DoctorFinding]:
    """Examine the memory through which the workers of a loader hand over batches, by writing to it."""
    remedy = "Start the container with `--shm-size=8g` or `--ipc=host`, or set num_workers=0."
    return [_written(_MEMORY, str(folder), folder, remedy)]


def _written(topic: str, shown: str, folder: Path, remedy: str) -> DoctorFinding:
    """Write to a folder, and check the free space."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_MIB))  # a container may limit writes below the size that it shows
            file.flush()
            os.fsync(file.fileno())  # a network disk or a quota may refuse only now
    except OSError as error:
        return problem(topic, f"{shown} cannot be written; got {error.strerror or error}", remedy)
    free = shutil.disk_usage(folder).free
    message = f"{shown} has {free / _GIB:,.1f} GiB free"
    return ok(topic, message) if free >= _GIB else warning(topic, message, remedy)


def check_open_files() -> list[DoctorFinding]:
    """Examine how many files a process may have open: loaders with workers and many ranks need them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _FEW_FILES:
        return [ok(_FILES, "a process may open enough files")]
    remedy = "Run `ulimit -n 65536` before the launch; the container or /etc/security/limits.conf may set less."
    return [warning(_FILES, f"a process may open {limit} files", remedy)]
