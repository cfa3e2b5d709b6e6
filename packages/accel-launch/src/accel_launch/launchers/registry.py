"""Finds the launcher for a run: third parties' are asked first, then the built-in ones in a fixed order."""

from accel_core.host.installed import points_of
from accel_core.options.engines import engines, load
from accel_launch.launchers.launcher import Launcher
from accel_launch.settings.resolve import Settings

ENTRY_POINT_GROUP = "accel.launchers"
"""Entry-point group under which other distributions offer launchers."""

BUILT_IN = (
    "accel_launch.launchers.slurm:SlurmLauncher",
    "accel_launch.launchers.ray:RayLauncher",
    "accel_launch.launchers.sagemaker:SageMakerLauncher",
    "accel_launch.launchers.tpu:TpuLauncher",
    "accel_launch.launchers.mpi:MpiLauncher",
    "accel_launch.launchers.torchrun:TorchrunLauncher",
    "accel_launch.launchers.simple:SimpleLauncher",
)
"""Launchers that come with accel-launch; the first that claims the run starts it, those of engines before torchrun."""


def choose(settings: Settings) -> Launcher:
    """Return the launcher that claims a run."""
    engines_own = (engine.launcher for engine in engines().values() if engine.launcher)
    for place in (*points_of(ENTRY_POINT_GROUP).values(), *BUILT_IN[:-2], *engines_own, *BUILT_IN[-2:]):
        launcher: Launcher = load(place)()
        if launcher.claims(settings):
            return launcher
    raise AssertionError("the simple launcher claims every run")
