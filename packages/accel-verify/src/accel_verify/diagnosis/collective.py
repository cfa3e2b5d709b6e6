"""A collective between two ranks, started as `accel launch` starts them."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from accel_core.host.program.run_module import own_command
from accel_verify.diagnosis.finding import DoctorFinding, ok, problem
from accel_verify.diagnosis.variables import without_settings

__all__ = ["check_collective"]

_TOPIC = "Two ranks"
_SHUTDOWN_S = 15.0


def check_collective(hardware: str, environment: Mapping[str, str], seconds: float) -> DoctorFinding:
    """Start two ranks that gather from each other."""
    words = ["launch", hardware, "--num-processes", "2", *own_command("accel_launch.selfcheck", "gather")[1:]]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.yaml"
        empty.write_text("compute_environment: LOCAL_MACHINE\n")  # else the user's own file would be read
        process = subprocess.Popen(
            own_command("accel_launch", *words[:1], "--config-file", str(empty), *words[1:]),
            env=without_settings(environment),  # the two ranks test the machine, not the settings
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            _end(process)
            message = f"two ranks ({hardware}) did not gather within {seconds:g} s"
            remedy = f"Pass a longer --timeout, or see where they wait: `accel {' '.join(words)}` with `--watchdog 30`."
            return problem(_TOPIC, message, remedy)
    if process.returncode == 0:
        return ok(_TOPIC, f"two ranks ({hardware}) started and gathered in {time.monotonic() - begun:.1f} s")
    message = f"two ranks ({hardware}) failed with status {process.returncode}; got {_last_line(printed)}"
    return problem(_TOPIC, message, f"See all that they print: `accel {' '.join(words)}`.")


def _end(process: "subprocess.Popen[str]") -> None:
    """End the launcher, which ends its ranks, and kill what is left of its session."""
    process.terminate()
    try:
        process.communicate(timeout=_SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _last_line(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
