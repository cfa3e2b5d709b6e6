"""SLURM: its programs; inside a job also what this task was given, and where its ranks would meet."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from accel_core.errors import AccelError
from accel_launch.launchers.slurm import facts_of
from accel_launch.settings.layout import counted
from accel_launch.settings.resolve import Settings
from accel_verify.diagnosis.finding import DoctorFinding, from_error, ok, problem, warning

_TOPIC, _PROGRAMS = "SLURM", ("sbatch", "srun", "scontrol")
_SettingsOf = Callable[[Sequence[str]], Settings]


def check_slurm(environment: Mapping[str, str], settings_of: _SettingsOf) -> Iterator[DoctorFinding]:
    """Examine SLURM as it is seen from a login node, or from inside a job."""
    job = environment.get("SLURM_JOB_ID", "")
    missing = [name for name in _PROGRAMS if shutil.which(name, path=environment.get("PATH")) is None]
    remedy = "Go to a login node or into a job of the cluster, or load its module of SLURM."
    found = warning if job else problem  # a job may run in a container
    yield found(_TOPIC, f"{', '.join(missing)} not on PATH", remedy) if missing else _controller()
    if job:
        yield from _place(job, environment, settings_of)
        yield from _given(environment)
        yield from [] if missing else _limits(job)
    elif not missing:
        yield ok(_TOPIC, "no job around this shell; `accel launch --launcher slurm` submits one")


def _controller() -> DoctorFinding:
    version, controller = _said("sbatch", "--version"), _said("scontrol", "ping")
    message = f"{', '.join(_PROGRAMS)} of {version}; {controller}"
    return ok(_TOPIC, message) if " is UP" in controller else problem(_TOPIC, message, "Set SLURM_CONF to slurm.conf.")


def _said(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:  # they wait a minute for a configuration that is not there
        return f"`{' '.join(words)}` does not answer"
    return " ".join((done.stdout + done.stderr).split())


def _place(job: str, environment: Mapping[str, str], settings_of: _SettingsOf) -> Iterator[DoctorFinding]:
    nodes, step = environment.get("SLURM_JOB_NODELIST", "unknown nodes"), environment.get("SLURM_STEP_ID")
    if step is None:
        yield ok(_TOPIC, f"job {job} on {nodes}, outside srun; `srun accel launch …` starts a launcher on each node")
        return
    try:
        settings = settings_of([])
        layout, host, port = settings.layout, settings["main_process_ip"], settings["main_process_port"]
        yield ok(_TOPIC, f"job {job}, step {step}: machine {layout.machine_rank} of {layout.machines}, on {nodes}")
        if layout.machines > 1:
            address = socket.getaddrinfo(host, port)[0][4][0]
            yield ok(_TOPIC, f"ranks would meet at {host} ({address}), port {port}")
    except AccelError as error:
        yield from_error(_TOPIC, error)
    except OSError as error:
        message = f"{host}, where ranks would meet, has no address; got {error.strerror}"
        yield problem(_TOPIC, message, "Pass an address that all nodes reach as --main-process-ip.")


def _given(environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    cores = len(os.sched_getaffinity(0))
    gpus = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS")
    message = f"this task has {counted(cores, 'core')} and {f'the GPUs {gpus}' if gpus else 'no GPU'}"
    remedy = "Ask for more with `cpus-per-task`, or take whole nodes with `exclusive`."
    yield ok(_TOPIC, message) if cores > 1 else warning(_TOPIC, message, remedy)


def _limits(job: str) -> Iterator[DoctorFinding]:
    try:
        facts = facts_of(job)
    except AccelError as error:
        yield from_error(_TOPIC, error)
        return
    limit, may = facts["TimeLimit"], facts["Requeue"] == "1"
    if limit != "UNLIMITED":
        left = time.mktime(time.strptime(facts["EndTime"], "%Y-%m-%dT%H:%M:%S")) - time.time()
        limit = f"{limit}, of which {left / 60:.0f} min are left"
    yield ok(_TOPIC, f"time limit: {limit}")
    message = f"the job may {'' if may else 'not '}be requeued"
    yield ok(_TOPIC, message) if may else warning(_TOPIC, message, "Submit it with `requeue`.")
