"""One process, started without torch."""

from accel_launch.launchers.launcher import Launcher, script_command
from accel_launch.settings.resolve import Settings


class SimpleLauncher(Launcher):
    """One process on this machine."""

    name = "simple"
    one_rank = True

    def claims(self, settings: Settings) -> bool:
        """Take every run that no other launcher claimed."""
        return True

    def command(self, settings: Settings) -> list[str]:
        """Return the script's own command line."""
        return script_command(settings)
