"""A collective between two ranks, started as `accel launch` starts them."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from accel_core.host.program.run_module import own_command
from accel_verify.diagnosis.finding import DoctorFinding, ok, problem
from accel_verify.diagnosis.variables import without_settings
from accel_verify.ranks import run_ranks

_TOPIC = "Two ranks"


def check_collective(hardware: str, environment: Mapping[str, str], seconds: float) -> DoctorFinding:
    """Start two ranks that gather from each other."""
    words = ["launch", hardware, "--num-processes", "2", *own_command("accel_launch.selfcheck", "gather")[1:]]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.yaml"
        empty.write_text("compute_environment: LOCAL_MACHINE\n")
        command = own_command("accel_launch", *words[:1], "--config-file", str(empty), *words[1:])
        # The launcher counts as one rank here: what it started bears its mark, and ends with it.
        ended = run_ranks([command], [without_settings(environment)], Path(folder), seconds)
        last = next((line.strip() for line in reversed(ended.tail(0).splitlines()) if line.strip()), "no output")
    if ended.timed_out:
        message = f"two ranks ({hardware}) did not gather within {seconds:g} s"
        remedy = f"Pass a longer --timeout, or see where they wait: `accel {' '.join(words)}` with `--watchdog 30`."
        return problem(_TOPIC, message, remedy)
    if ended.failed is None:
        return ok(_TOPIC, f"two ranks ({hardware}) started and gathered in {time.monotonic() - begun:.1f} s")
    message = f"two ranks ({hardware}) failed with status {ended.codes[0]}; got {last}"
    return problem(_TOPIC, message, f"See all that they print: `accel {' '.join(words)}`.")
