"""Many processes, or many machines, on torch's elastic agent."""

import sys

from accel_launch.imports import load
from accel_launch.launchers.launcher import Launcher
from accel_launch.settings.child import switched
from accel_launch.settings.resolve import Settings


class TorchrunLauncher(Launcher):
    """As many processes as asked for, on this machine and on others."""

    name = "torchrun"

    def claims(self, settings: Settings) -> bool:
        """Take every run of several processes or machines, and engines that need a process group even for one."""
        layout = settings.layout
        several = layout.processes > 1 or layout.machines > 1 or bool(settings["max_restarts"])
        return several or bool(switched(settings) or settings["use_parallelism_config"] or settings["multi_gpu"])

    def command(self, settings: Settings) -> list[str]:
        """Return the equivalent command line of torchrun; `run` does the same in this process."""
        layout = settings.layout
        words = [sys.executable, "-m", "torch.distributed.run"]
        words += [f"--nnodes={layout.nnodes}", f"--nproc-per-node={layout.per_machine}"]
        if layout.machines > 1:
            words += [f"--node-rank={layout.machine_rank}", f"--rdzv-backend={settings['rdzv_backend']}"]
            words += [f"--rdzv-endpoint={settings['main_process_ip']}:{settings['main_process_port']}"]
        else:
            words += ["--standalone"]
        for key in ("max_restarts", "monitor_interval", "role", "tee", "log_dir", "rdzv_conf"):
            if settings.is_set(key):
                words.append(f"--{key.replace('_', '-')}={settings[key]}")
        if settings["module"]:
            words += ["--module"]
        if settings["no_python"]:
            words += ["--no-python"]
        return [*words, str(settings.script), *settings.arguments]

    def run(self, settings: Settings) -> int:
        """Start the processes under torch's elastic agent, which is imported here for the first time."""
        return int(load("accel_launch.launchers.elastic").run_elastic(settings, dict(self.environ(settings))))
