"""Processes started by mpirun over the hosts of a file."""

import shutil
import subprocess
from collections.abc import Mapping

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_launch.launchers.launcher import Launcher, script_command
from accel_launch.settings.resolve import Settings

_FLAGS = {
    "Open MPI": ("--hostfile", "--npernode", ("--bind-to", "socket")),
    "Intel": ("-f", "-ppn", ()),
    "mvapich2": ("-f", "-ppn", ()),
    "HYDRA": ("-f", "-ppn", ()),
}
"""By a word that `mpirun --version` prints: the flags for hosts and for processes per host, and further arguments."""

_NOT_FORWARDED = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH"}  # paths of this machine may not exist on another


def flavor(program: str) -> str:
    """Return which MPI a program belongs to."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    for word in _FLAGS:
        if word.lower() in version.lower():
            return word
    raise ConfigurationError(
        f"The MPI of {program} is not known; got {version.strip()[:80]!r} as its version. Use Open MPI, Intel MPI, "
        "MVAPICH2 or MPICH."
    )


class MpiLauncher(Launcher):
    """mpirun, with a hostfile; the processes learn their ranks from MPI's own variables."""

    name = "mpi"

    def claims(self, settings: Settings) -> bool:
        """Take a run that names a hostfile for MPI."""
        return settings["mpirun_hostfile"] is not None

    def command(self, settings: Settings) -> list[str]:
        """Return mpirun's command line."""
        search = settings.inherited.get("PATH")
        program = next((name for name in ("mpirun", "mpiexec") if shutil.which(name, path=search)), None)
        if program is None:
            raise MissingDependencyError(
                "Starting over --mpirun-hostfile needs mpirun or mpiexec; got neither on PATH. Install Open MPI, "
                "Intel MPI, MVAPICH2 or MPICH."
            )
        kind = flavor(str(shutil.which(program, path=search)))
        hosts, each, more = _FLAGS[kind]
        layout = settings.layout
        words = [program, hosts, str(settings["mpirun_hostfile"])]
        words += [each, str(layout.per_machine), "-n", str(layout.processes), *more]
        if kind == "Open MPI":
            for name, value in self.environ(settings).items():
                if name not in _NOT_FORWARDED:
                    words += ["-x", f"{name}={value}"]
        return [*words, *script_command(settings)]

    def environ(self, settings: Settings) -> Mapping[str, str]:
        """Return the variables of the settings, and where rank 0 is."""
        return {
            **super().environ(settings),
            "MASTER_ADDR": str(settings["main_process_ip"] or "127.0.0.1"),
            "MASTER_PORT": str(settings["main_process_port"] or 29500),
        }
