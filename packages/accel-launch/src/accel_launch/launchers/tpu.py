"""TPU machines through torch-xla: the processes of this machine, or every machine of a pod."""

from collections.abc import Mapping

from accel_core.errors import ConfigurationError
from accel_core.host.program.run_module import own_command
from accel_core.options.engines import engines
from accel_launch.launchers.launcher import Launcher
from accel_launch.settings.resolve import Settings


class TpuLauncher(Launcher):
    """torch-xla starts one process per core, each running the script's main training function."""

    name = "tpu"

    def claims(self, settings: Settings) -> bool:
        """Take a run on a TPU."""
        return bool(settings["tpu"])

    def command(self, settings: Settings) -> list[str]:
        """Return the command line for this machine, or the one that reaches every machine of the pod."""
        if not settings["tpu_use_cluster"]:
            function = str(settings["main_training_function"] or "main")
            words = own_command("accel_launch.launchers.xla_processes", "--function", function)
            words += ["--module"] if settings["module"] else []
            return [*words, str(settings.script), *settings.arguments]
        name = str(settings.config.get("tpu_name") or "")
        words = own_command("torch_xla.distributed.xla_dist", "--tpu", name)
        for vm in settings["vm"] or []:
            words += ["--vm", str(vm)]
        for pair in settings["env"] or []:
            words += ["--env", str(pair)]
        there = ["sudo"] if settings["tpu_use_sudo"] else []
        there += ["accel", "launch", "--tpu", "--no-tpu-cluster", "--num-machines", "1"]
        if settings["num_processes"]:
            there += ["--num-processes", str(settings["num_processes"])]
        if settings["mixed_precision"]:
            there += ["--mixed-precision", str(settings["mixed_precision"])]
        there += ["--main-training-function", str(settings["main_training_function"] or "main")]
        return [*words, "--", *there, str(settings.script), *settings.arguments]

    def environ(self, settings: Settings) -> Mapping[str, str]:
        """Return the variables of the settings, and torch-xla's own for bf16."""
        found = dict(super().environ(settings))
        if settings["mixed_precision"] == "bf16":
            found["XLA_DOWNCAST_BF16" if settings["downcast_bf16"] else "XLA_USE_BF16"] = "1"
        return found

    def run(self, settings: Settings) -> int:
        """Start the processes.

        Raises:
            MissingDependencyError: torch-xla is not installed.
            ConfigurationError: A pod is asked for without its name.
        """
        engines()["xla"].require()
        name = str(settings.config.get("tpu_name") or "")
        if settings["tpu_use_cluster"] and not name:
            raise ConfigurationError(
                f"A TPU pod is reached by its name; got {name!r} as tpu_name of the configuration file. Write one with "
                "`accel config`."
            )
        return super().run(settings)
