"""What a launcher is."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping

from accel_launch.settings.child import child_environment
from accel_launch.settings.resolve import Settings
from accel_launch.settings.table import BY_KEY
from accel_launch.supervision.run import supervise


def script_command(settings: Settings) -> list[str]:
    """Return the command line of the script itself, as each process gets it."""
    script = str(settings.script)
    if settings["no_python"]:
        return [script, *settings.arguments]
    return [sys.executable, *(["-m"] if settings["module"] else []), script, *settings.arguments]


def flags_of(settings: Settings, left_out: Container[str], origins: Container[str] = ("flag",)) -> Iterator[str]:
    """Yield flags that give a launcher elsewhere the settings of this one, which came from one of the origins."""
    for key, setting in BY_KEY.items():
        found = settings.resolved[key]
        if found.origin not in origins or key in left_out:
            continue
        flag = setting.words[-1]
        if setting.kind == "switch":
            yield from [flag] * bool(found.value)
            continue
        for value in found.value if setting.kind == "append" else [found.value]:
            yield f"{flag}={','.join(map(str, value)) if isinstance(value, tuple) else value}"


class Launcher(ABC):
    """A way of starting the processes of a run.

    The launcher is asked in this order: `claims` for every launcher until one answers yes; then `command` and `environ`
    for what is shown by `--dry-run`; then `run`. A third party offers a launcher under the entry-point group
    `accel.launchers`: a class, or any object made without arguments, with these methods.

    Attributes:
        name: What `--dry-run` calls it.
        one_rank: Whether its command is one rank, and not a program that starts them: then one traceback is shown.
    """

    name: str = ""
    one_rank: bool = False

    @abstractmethod
    def claims(self, settings: Settings) -> bool:
        """Return whether this launcher is the one for these settings.

        Args:
            settings: All settings of the run.
        """

    @abstractmethod
    def command(self, settings: Settings) -> list[str]:
        """Return the command line that starts this machine's part of the run.

        Args:
            settings: All settings of the run.
        """

    def environ(self, settings: Settings) -> Mapping[str, str]:
        """Return the variables that the processes get beyond what they inherit.

        Args:
            settings: All settings of the run.
        """
        return child_environment(settings)

    def job(self, settings: Settings) -> str:
        """Return the text that a scheduler gets; empty where this command starts the processes itself.

        Args:
            settings: All settings of the run.
        """
        return ""

    def run(self, settings: Settings) -> int:
        """Start the run, wait for it, report a failure, and leave no process behind.

        Args:
            settings: Settings of the run.

        Returns:
            The exit status for the shell.
        """
        environment = {**settings.inherited, **self.environ(settings)}
        return supervise(self.command(settings), environment, settings, one_rank=self.one_rank)
