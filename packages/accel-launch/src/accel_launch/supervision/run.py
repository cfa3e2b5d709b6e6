"""Runs one command and waits for its end."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from accel_launch.supervision.supervisor import Supervisor, cannot_start
from accel_launch.terminal import flush_output


def supervise(
    command: Sequence[str], environment: Mapping[str, str], settings: Mapping[str, Any], *, one_rank: bool
) -> int:
    """Run one command to its end.

    Its error stream is passed on and remembered. A signal to the launcher goes to the whole process group; a second one
    kills it, and so does the end of the time that it has after the first. When the command fails, the record of the
    failure is written and shown.

    Raises:
        ConfigurationError: The folder for logs cannot be used.
        LaunchError: The program cannot be started.
    """
    with Supervisor(settings, command, hold=one_rank) as supervisor:
        ends = {name: followed.child_end for name, followed in supervisor.follow(0, 0).items()}
        flush_output()
        supervisor.signals.install()  # first, so that no signal ends the launcher and leaves the process running
        try:
            process = subprocess.Popen(
                list(command),
                env={**environment, **supervisor.variables(0)},
                start_new_session=True,  # a group of its own: Ctrl-C reaches it once, through the launcher
                stdout=ends.get("stdout"),
                stderr=ends["stderr"],
            )
        except OSError as error:
            raise cannot_start(command[0], error) from None
        supervisor.started(0, process.pid)
        supervisor.signals.repeat()  # a signal may have come before there was a process
        status = process.wait()
    return supervisor.report({0: status})
