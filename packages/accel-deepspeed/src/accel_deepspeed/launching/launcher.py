"""DeepSpeed's own launcher, for runs over several machines that it reaches by itself (pdsh, MPI, SLURM)."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_deepspeed.launching.hosts import MPI, check_hosts, launcher_of
from accel_launch.launchers.launcher import Launcher
from accel_launch.settings.reading import read_text, shortened
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.run import supervise
from accel_launch.terminal import say

_FILE_VARIABLE = "DS_ENV_FILE"
"""Variable that names the file in place of `.deepspeed_env`."""

_USUAL_FILE = ".deepspeed_env"
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLAIN = re.compile(r"[\w@%+=:,./-]*")
"""Values that DeepSpeed writes into the command line as they are; it puts others between double quotes."""

_SPECIAL = re.compile(r'(["\\$`])')


def carried(value: str, launcher: str) -> str | None:
    """Return a value as written in DeepSpeed's file of variables, so that other machines get it unchanged."""
    if value != value.strip() or len(value.splitlines()) > 1:
        return None
    if launcher in MPI:
        return value if _PLAIN.fullmatch(value) else None
    quoted = value if _PLAIN.fullmatch(value) else _SPECIAL.sub(r"\\\1", value)
    return quoted.replace("%", "%%")  # pdsh puts host and rank in place of %h and %n


class DeepSpeedLauncher(Launcher):
    """The program `deepspeed`; a `standard` run over several machines goes through torchrun like any other."""

    name = "deepspeed"

    def claims(self, settings: Settings) -> bool:
        """Take a DeepSpeed run over several machines, unless it asks for the standard way."""
        return launcher_of(settings) is not None

    def needs(self, settings: Settings) -> list[str]:
        """Return the settings without which machines do not find each other, and refuse hosts that do not fit."""
        check_hosts(settings)
        return ["main_process_ip", "machine_rank"] if launcher_of(settings) == "nossh" else []

    def command(self, settings: Settings) -> list[str]:
        """Return the command line of DeepSpeed's launcher."""
        launcher, layout = launcher_of(settings) or "pdsh", settings.layout
        words = ["deepspeed", "--hostfile", str(settings["deepspeed_hostfile"]), "--no_local_rank"]
        if launcher == "nossh":
            words += ["--no_ssh", "--node_rank", str(layout.machine_rank)]
        else:
            words += ["--launcher", launcher]
        filters = {"--exclude": "deepspeed_exclusion_filter", "--include": "deepspeed_inclusion_filter"}
        given = [word for flag, key in filters.items() if settings[key] for word in (flag, str(settings[key]))]
        words += given or ([] if launcher in MPI else ["--num_gpus", str(layout.per_machine)])
        if settings["main_process_ip"]:
            words += ["--master_addr", str(settings["main_process_ip"])]
        words += ["--master_port", str(settings["main_process_port"] or 29500)]
        if settings["module"]:
            words.append("--module")
        elif settings["no_python"]:
            words.append("--no_python")
        return [*words, str(settings.script), *settings.arguments]

    def run(self, settings: Settings) -> int:
        """Start the program, with a file of the variables that it sends to every machine.

        Raises:
            ConfigurationError: A variable of the settings cannot be handed over, or the user's own file is not valid.
            MissingDependencyError: DeepSpeed or the program of its launcher is not installed.
        """
        launcher = launcher_of(settings) or "pdsh"
        if shutil.which("deepspeed", path=settings.inherited.get("PATH")) is None:
            raise MissingDependencyError(
                "A DeepSpeed run over several machines needs its program; `deepspeed` is not on PATH. Install "
                "deepspeed, or pass --deepspeed-multinode-launcher standard."
            )
        environment = {**settings.inherited, **self.environ(settings)}
        with _file_of(self._variables(settings, launcher), settings, launcher) as path:
            if path is not None:
                environment[_FILE_VARIABLE] = path
            return supervise(self.command(settings), environment, settings, one_rank=self.one_rank)

    def _variables(self, settings: Settings, launcher: str) -> list[str]:
        """Return the lines that hand the environment over, and name what they leave out."""
        ours = self.environ(settings)
        lines, lost = [], []
        for name, value in {**settings.inherited, **ours}.items():
            if not _NAME.fullmatch(name) or name == _FILE_VARIABLE:
                continue  # a function of bash, or what names the file itself
            text = carried(value, launcher)
            if text is not None:
                lines.append(f"{name}={text}")
            elif name in ours:
                raise ConfigurationError(
                    f"The multinode launcher {launcher} cannot hand a value over to other machines; got "
                    f"{name}={shortened(value)!r}. Change the value, or pass --deepspeed-multinode-launcher standard."
                )
            else:
                lost.append(name)
        if lost and not settings["quiet"]:
            say(
                f"accel launch: the multinode launcher {launcher} cannot hand these variables over to other "
                f"machines; got {', '.join(sorted(lost))}. Set them there, if the script needs them."
            )
        return lines


@contextlib.contextmanager
def _file_of(lines: list[str], settings: Settings, launcher: str) -> Iterator[str | None]:
    """Write the variables to a file of this run, and leave the user's own file unchanged.

    Nothing is written if processes inherit the environment: SLURM passes all of it on, and without ssh every machine
    is started by hand.
    """
    if launcher in ("slurm", "nossh"):
        yield None
        return
    descriptor, path = tempfile.mkstemp(prefix="accel-deepspeed-env-")  # readable by this user alone
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in [*_own_lines(settings.inherited), *lines])
        yield path
    finally:
        os.unlink(path)


def _own_lines(inherited: Mapping[str, str]) -> list[str]:
    """Return the lines of the user's own files, in the order in which DeepSpeed reads them."""
    name = inherited.get(_FILE_VARIABLE) or _USUAL_FILE
    found: list[str] = []
    for path in dict.fromkeys(Path(folder).expanduser() / name for folder in ("~", ".")):
        if path.is_file():
            found += filter(str.strip, read_text(path, "DeepSpeed's file of variables").splitlines())
    return found
