"""Disk space, shared memory and the limit of open files."""

import os
import resource
import tempfile
from pathlib import Path

from accel_core.host import environ
from accel_launch.settings.location import config_folder
from accel_verify.diagnosis.finding import DoctorFinding, ok, problem, warning

__all__ = ["check_disks", "check_open_files", "check_shared_memory"]

_DISK, _MEMORY, _FILES = "Disk space", "Shared memory", "Open files"
_GIB, _MIB = 2**30, 2**20
_LITTLE = _GIB
_FEW_INODES = 1000
_FEW_FILES = 1024


def check_disks(checkpoints: Path) -> list[DoctorFinding]:
    """Examine the folders that a run writes to, by writing to them."""
    findings = [_folder("checkpoints", checkpoints)]
    temporary = environ.text("TMPDIR")
    if temporary and not Path(temporary).is_dir():
        findings.append(
            warning(
                _DISK,
                f"TMPDIR is not a folder; got {temporary}, and {tempfile.gettempdir()} is used instead",
                f"Run `mkdir -p {temporary}`, or unset TMPDIR.",
            )
        )
    findings.append(_folder("temporary files", Path(tempfile.gettempdir())))
    findings.append(_folder("cache", config_folder().parent))
    return findings


def _folder(name: str, folder: Path) -> DoctorFinding:
    """Write to a folder, or to the one in which it would be created, and check the free space."""
    # A run creates missing folders.
    there = next((place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())  # a network disk or a quota may refuse only now
        space = os.statvfs(there)
    except OSError as error:
        return problem(
            _DISK,
            f"{name}: {folder} cannot be written; got {error.strerror or error}",
            f"Free space, correct the rights of {there}, or use another folder.",
        )
    free = space.f_bavail * space.f_frsize
    message = f"{name}: {folder} has {_size(free)} free"
    if free < _LITTLE:
        return warning(_DISK, message, "Delete what is not needed, or use another disk.")
    if space.f_files and space.f_favail < _FEW_INODES:  # some filesystems count no inodes
        return warning(
            _DISK, f"{message}, and room for {space.f_favail} files", "Delete small files that are not needed."
        )
    return ok(_DISK, message)


def _size(amount: int) -> str:
    return f"{amount / _GIB:,.1f} GiB" if amount >= _GIB else f"{amount / _MIB:,.0f} MiB"


def check_shared_memory(folder: Path = Path("/dev/shm")) -> list[DoctorFinding]:
    """Examine the memory through which the workers of a loader hand over batches, by writing to it."""
    remedy = "Start the container with `--shm-size=8g` or `--ipc=host`, or set num_workers=0."
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_MIB))  # a container may limit writes below the size that it shows
            file.flush()
        space = os.statvfs(folder)
    except OSError as error:
        message = f"{folder} cannot be written; got {error.strerror or error}"
        return [problem(_MEMORY, message, remedy)]
    free = space.f_bavail * space.f_frsize
    message = f"{folder} has {_size(free)} free"
    return [ok(_MEMORY, message) if free >= _LITTLE else warning(_MEMORY, message, remedy)]


def check_open_files() -> list[DoctorFinding]:
    """Examine how many files a process may have open: loaders with workers and many ranks need them."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "any number of" if limit == resource.RLIM_INFINITY else str(limit)
    message = f"a process may open {shown} files"
    if limit == resource.RLIM_INFINITY or limit >= _FEW_FILES:
        return [ok(_FILES, message)]
    wanted = 65536 if most == resource.RLIM_INFINITY else min(65536, most)
    if wanted > limit:
        remedy = f"Run `ulimit -n {wanted}` before the launch."
    else:
        remedy = "Raise the hard limit in /etc/security/limits.conf, or in the settings of the container."
    return [warning(_FILES, message, remedy)]
