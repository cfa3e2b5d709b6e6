"""The environment contract: what the launcher's settings become in the environment of the processes."""

from collections.abc import Mapping

from accel_launch.settings.resolve import Settings

__all__ = ["child_environment"]


def child_environment(settings: Settings) -> Mapping[str, str]:
    """Return the variables that tell the training side about the settings.

    Args:
        settings: Settings of the run.

    Returns:
        Variables beyond the rank's own (RANK, WORLD_SIZE, …), by name.
    """
    found = {
        "ACCELERATE_USE_CPU": str(bool(settings["cpu"])),
        "ACCELERATE_MIXED_PRECISION": settings["mixed_precision"] or "no",
    }
    if settings["num_cpu_threads_per_process"]:
        found["OMP_NUM_THREADS"] = str(settings["num_cpu_threads_per_process"])
    if settings["gpu_ids"] not in (None, "all"):
        found["CUDA_VISIBLE_DEVICES"] = settings["gpu_ids"]
    if settings["debug"]:
        found["ACCELERATE_DEBUG_MODE"] = "true"
    if settings["enable_cpu_affinity"]:
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    return found
