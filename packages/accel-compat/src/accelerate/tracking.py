"""The names of `accelerate.tracking` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import listify as listify
from accel_core.host.environ import str_to_bool as str_to_bool
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.logging import get_logger as get_logger
from accel_core.options.enums import LoggerType as LoggerType
from accel_core.state.process import PartialState as PartialState
from accel_core.tracking.discovery import filter_trackers as filter_trackers
from accel_core.tracking.discovery import get_available_trackers as get_available_trackers
from accel_core.tracking.discovery import register_tracker_class as register_tracker_class
from accel_core.tracking.tracker import GeneralTracker as GeneralTracker
from accel_core.tracking.tracker import on_main_process as on_main_process
from accelerate import _rebinding
from accelerate._availability import is_aim_available as is_aim_available
from accelerate._availability import is_clearml_available as is_clearml_available
from accelerate._availability import is_comet_ml_available as is_comet_ml_available
from accelerate._availability import is_dvclive_available as is_dvclive_available
from accelerate._availability import is_mlflow_available as is_mlflow_available
from accelerate._availability import is_swanlab_available as is_swanlab_available
from accelerate._availability import is_tensorboard_available as is_tensorboard_available
from accelerate._availability import is_trackio_available as is_trackio_available
from accelerate._availability import is_wandb_available as is_wandb_available

_LATER = {
    "accel_trackers.aim": [  # a module for each library, as a run uses one or two
        "AimTracker",
    ],
    "accel_trackers.clearml": [
        "ClearMLTracker",
    ],
    "accel_trackers.comet_ml": [
        "CometMLTracker",
    ],
    "accel_trackers.dvclive": [
        "DVCLiveTracker",
    ],
    "accel_trackers.mlflow": [
        "MLflowTracker",
    ],
    "accel_trackers.swanlab": [
        "SwanLabTracker",
    ],
    "accel_trackers.tensorboard": [
        "TensorBoardTracker",
    ],
    "accel_trackers.trackio": [
        "TrackioTracker",
    ],
    "accel_trackers.wandb": [
        "WandBTracker",
    ],
    "accelerate._trackers": [  # imports all of them
        "LOGGER_TYPE_TO_CLASS",
    ],
}
_rebinding.write_through(__name__, _LATER)
