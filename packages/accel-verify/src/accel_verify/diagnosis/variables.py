"""Environment variables: misspelled names, and variables that contradict each other."""

import os
from collections.abc import Iterator, Mapping

from accel_launch.settings.variables import KNOWN, unread
from accel_verify.diagnosis.finding import DoctorFinding, ok, problem, warning

_TOPIC = "Environment variables"
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that accel reads and those that a launcher sets for a rank."""
    return {name: value for name, value in environment.items() if name not in KNOWN and name not in _OF_RANKS}


def check_variables(environment: Mapping[str, str]) -> list[DoctorFinding]:
    """Examine the variables that processes will inherit."""
    found = [*_unknown(environment), *_contradictions(environment)]
    set_here = sorted(name for name in environment if name in KNOWN)
    return found or [ok(_TOPIC, f"no contradiction; accel reads {', '.join(set_here) or 'none that is set'}")]


def _unknown(environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name, near in unread(environment):
        remedy = f"Did you mean {near}?" if near else "Unset it, or see the page of environment variables."
        yield warning(_TOPIC, f"nothing reads {name}", remedy)


def _contradictions(environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    yield from _ranks(environment)
    device, visible = environment.get("ACCELERATE_TORCH_DEVICE", ""), environment.get("CUDA_VISIBLE_DEVICES")
    if _on(environment, "ACCELERATE_USE_CPU") and device.partition(":")[0] not in ("", "cpu"):
        yield problem(
            _TOPIC,
            f"ACCELERATE_USE_CPU asks for the CPU, and ACCELERATE_TORCH_DEVICE for {device}",
            "Unset one of the two.",
        )
    chosen = environment.get("ACCEL_GPU_IDS", "all")
    if visible is not None and chosen not in ("", "all", visible):
        yield warning(
            _TOPIC,
            f"ACCEL_GPU_IDS={chosen} replaces CUDA_VISIBLE_DEVICES={visible} in the processes",
            "Unset one of the two.",
        )
    threads, cores = environment.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
    if threads.isdecimal() and int(threads) > cores:
        yield warning(
            _TOPIC,
            f"OMP_NUM_THREADS gives each process {threads} threads, for {cores} cores",
            f"Set it to {cores} divided by the number of processes, or unset it.",
        )


def _ranks(environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Look for variables that a launcher sets for its processes, in a shell that is not one of them."""
    set_here = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if environment.get(name)]
    if not set_here:
        return
    shown = ", ".join(f"{name}={environment[name]}" for name in set_here)
    if environment.get("WORLD_SIZE") != "1" or len(set_here) < 3:
        message = (
            f"this shell has variables of a started process ({shown}): a script run without a launcher waits for others"
        )
        yield warning(_TOPIC, message, f"Run `unset {' '.join(set_here)}`.")


def _on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")
