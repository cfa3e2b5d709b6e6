"""DeepSpeed's own launcher, for runs over several machines that it reaches by itself (pdsh, MPI, SLURM)."""

import re
import shutil
from pathlib import Path

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_launch.launchers.launcher import Launcher
from accel_launch.settings.layout import layout_of
from accel_launch.settings.resolve import Settings

__all__ = ["DeepSpeedLauncher"]

_CARRIED = re.compile(r"[\w.,:/=@%+-]*")


class DeepSpeedLauncher(Launcher):
    """The program `deepspeed`; a `standard` run over several machines goes through torchrun like any other."""

    name = "deepspeed"

    def claims(self, settings: Settings) -> bool:
        """Take a DeepSpeed run over several machines, unless it asks for the standard way."""
        several = layout_of(settings).machines > 1
        return bool(settings["use_deepspeed"]) and several and settings["deepspeed_multinode_launcher"] != "standard"

    def command(self, settings: Settings) -> list[str]:
        """Return the command line of DeepSpeed's launcher."""
        if settings["no_python"] and settings["module"]:
            raise ConfigurationError("--module and --no-python contradict each other; got both. Leave one out.")
        words = ["deepspeed", "--hostfile", str(settings["deepspeed_hostfile"]), "--no_local_rank"]
        words += ["--launcher", str(settings["deepspeed_multinode_launcher"] or "pdsh")]
        if settings["deepspeed_exclusion_filter"]:
            words += ["--exclude", str(settings["deepspeed_exclusion_filter"])]
        elif settings["deepspeed_inclusion_filter"]:
            words += ["--include", str(settings["deepspeed_inclusion_filter"])]
        else:
            words += ["--num_gpus", str(layout_of(settings).per_machine)]
        if settings["main_process_ip"]:
            words += ["--master_addr", str(settings["main_process_ip"])]
        words += ["--master_port", str(settings["main_process_port"] or 29500)]
        if settings["module"]:
            words.append("--module")
        elif settings["no_python"]:
            words.append("--no_python")
        return [*words, str(settings.script), *settings.arguments]

    def run(self, settings: Settings) -> int:
        """Hand the variables over in `.deepspeed_env`, which DeepSpeed sends to every machine, and start it.

        Raises:
            MissingDependencyError: DeepSpeed is not installed.
        """
        if shutil.which("deepspeed", path=settings.inherited.get("PATH")) is None:
            raise MissingDependencyError(
                "A DeepSpeed run over several machines needs its program; `deepspeed` is not on PATH. Install "
                "deepspeed, or pass --deepspeed-multinode-launcher standard."
            )
        lines = [
            f"{name}={value}\n" for name, value in self.environ(settings).items() if value and _CARRIED.fullmatch(value)
        ]
        Path(".deepspeed_env").write_text("".join(lines), encoding="utf-8")
        return super().run(settings)
