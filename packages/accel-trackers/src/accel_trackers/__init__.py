"""Experiment trackers for accel, one file each."""

from typing import Any

from accel_core._lazy import attach
from accel_trackers._version import __version__

_HOMES = {
    "AimTracker": "accel_trackers.aim",
    "ClearMLTracker": "accel_trackers.clearml",
    "CometMLTracker": "accel_trackers.comet_ml",
    "DVCLiveTracker": "accel_trackers.dvclive",
    "MLflowTracker": "accel_trackers.mlflow",
    "SwanLabTracker": "accel_trackers.swanlab",
    "TensorBoardTracker": "accel_trackers.tensorboard",
    "TrackioTracker": "accel_trackers.trackio",
    "WandBTracker": "accel_trackers.wandb",
}

_getattr, __dir__, _names = attach(__name__, _HOMES)

__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> Any:
    return _getattr(name)
