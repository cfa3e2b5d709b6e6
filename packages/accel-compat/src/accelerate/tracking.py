"""The names of `accelerate.tracking` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import (
    listify,
)
from accel_core.host.environ import (
    str_to_bool,
)
from accel_core.host.versions import (
    compare_versions,
)
from accel_core.logging import (
    get_logger,
)
from accel_core.options.enums import (
    LoggerType,
)
from accel_core.state.process import (
    PartialState,
)
from accel_core.tracking.discovery import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accel_core.tracking.tracker import (
    GeneralTracker,
    on_main_process,
)
from accel_trackers.aim import (
    AimTracker,
)
from accel_trackers.clearml import (
    ClearMLTracker,
)
from accel_trackers.comet_ml import (
    CometMLTracker,
)
from accel_trackers.dvclive import (
    DVCLiveTracker,
)
from accel_trackers.mlflow import (
    MLflowTracker,
)
from accel_trackers.swanlab import (
    SwanLabTracker,
)
from accel_trackers.tensorboard import (
    TensorBoardTracker,
)
from accel_trackers.trackio import (
    TrackioTracker,
)
from accel_trackers.wandb import (
    WandBTracker,
)
from accelerate._availability import (
    is_aim_available,
    is_clearml_available,
    is_comet_ml_available,
    is_dvclive_available,
    is_mlflow_available,
    is_swanlab_available,
    is_tensorboard_available,
    is_trackio_available,
    is_wandb_available,
)
from accelerate._rebinding import write_through

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "LoggerType",
    "MLflowTracker",
    "PartialState",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "compare_versions",
    "filter_trackers",
    "get_available_trackers",
    "get_logger",
    "is_aim_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_dvclive_available",
    "is_mlflow_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_trackio_available",
    "is_wandb_available",
    "listify",
    "on_main_process",
    "register_tracker_class",
    "str_to_bool",
]

write_through(__name__)
