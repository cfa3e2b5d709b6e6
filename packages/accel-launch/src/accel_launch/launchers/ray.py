"""Ray: one actor on each machine of a cluster, in one placement group, runs accel's own launcher there."""

import json
import shlex
import sys
from importlib.util import find_spec

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_launch.imports import load
from accel_launch.launchers.launcher import Launcher, flags_of
from accel_launch.settings.resolve import Settings

_DECIDED = {"launcher", "address", "ray", "num_processes", "nproc_per_node", "num_machines", "nnodes", "machine_rank",
            "main_process_ip", "main_process_port", "num_cpu_threads_per_process", "gpu_ids", "max_restarts", "tee",
            "config_file", "dry_run", "json", "explain", "all"}  # fmt: skip
"""Settings that the launchers of the machines do not get as they are."""


class RayLauncher(Launcher):
    """Actors of a Ray cluster, each of which runs a launcher on a machine of its own."""

    name = "ray"

    def claims(self, settings: Settings) -> bool:
        """Take a run for which Ray was asked by name.

        Raises:
            ConfigurationError: Settings that Ray decides.
        """
        if settings["launcher"] != self.name:
            return False
        refused = {
            "nnodes": (settings.layout.fewest_machines < settings.layout.machines, "Give a fixed number of machines."),
            "gpu_ids": (settings["gpu_ids"] not in (None, "all"), "Leave it out: Ray chooses the GPUs."),
            "address": (
                str(settings["address"]).startswith("ray://"),
                "Start it on a machine of the cluster, or send it there: `ray job submit -- accel launch …`.",
            ),
        }
        for key, (wrong, remedy) in refused.items():
            if wrong:
                raise ConfigurationError(
                    f"A run on Ray does not take this {key}; got {settings[key]} from {settings.source(key)}. {remedy}"
                )
        return True

    def command(self, settings: Settings) -> list[str]:
        """Return the command line of the launcher of one machine, without the address of machine 0."""
        layout = settings.layout
        words = [f"--machine-rank={layout.machine_rank}", f"--num-machines={layout.machines}"]
        words += [f"--nproc-per-node={layout.per_machine}", f"--num-cpu-threads-per-process={_threads(settings)}"]
        words += [
            f"--tee={settings['tee'] if settings.is_set('tee') else 3}",
            *flags_of(settings, _DECIDED, ("flag", "file")),
        ]
        return [sys.executable, "-m", "accel_launch", "launch", *words, str(settings.script), *settings.arguments]

    def job(self, settings: Settings) -> str:
        """Return what Ray is asked for, and what each actor runs."""
        lines = {
            "address": settings["address"],
            "runtime_env": json.dumps(_runtime_env(settings)),
            "placement group": f"STRICT_SPREAD, {settings.layout.machines} x {json.dumps(_resources(settings))}",
            "machine 0": shlex.join(self.command(settings)),
        }
        return "\n".join(f"{name}: {value}" for name, value in lines.items())

    def run(self, settings: Settings) -> int:
        """Start the actors, show what they print, and start them again after a failure if that was asked for.

        Raises:
            MissingDependencyError: ray is not installed.
            LaunchError: The cluster cannot be reached, or lacks the machines, or they lack the script.
        """
        if find_spec("ray") is None:
            raise MissingDependencyError(
                f"--launcher ray needs the library ray; got none in {sys.executable}. Run "
                "`pip install 'accel-launch[ray]'`; `--dry-run` shows without it what Ray would be asked for."
            )
        run_on_ray = load("accel_launch.launchers.ray_machines").run_on_ray
        words = self.command(settings)[5:]  # each machine has its own rank
        return int(run_on_ray(settings, words, _resources(settings), _runtime_env(settings)))


def _runtime_env(settings: Settings) -> dict[str, str]:
    """Return what Ray prepares on the machines, as `--ray` says it."""
    return dict(pair.split("=", 1) for pair in settings["ray"] or [])


def _resources(settings: Settings) -> dict[str, int]:
    """Return what Ray sets aside on each machine."""
    each = settings.layout.per_machine
    return {"CPU": each * _threads(settings)} | ({} if settings["cpu"] else {"GPU": each})


def _threads(settings: Settings) -> int:
    return int(settings["num_cpu_threads_per_process"] or 1)
