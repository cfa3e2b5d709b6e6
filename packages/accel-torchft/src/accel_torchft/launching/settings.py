"""Settings of the launcher for replicas."""

from accel_launch.settings.model import ELASTIC, Setting
from accel_launch.settings.rules import COUNT

SETTINGS = (
    Setting(
        "replicas",
        ELASTIC,
        "Number of replicas, each of --num-processes ranks, of which some may die while the others train on.",
        int,
        environment="ACCEL_REPLICAS",
        rule=COUNT,
    ),
    Setting(
        "min_replicas",
        ELASTIC,
        "With fewer replicas no step is made.",
        int,
        default=1,
        environment="ACCEL_MIN_REPLICAS",
        rule=COUNT,
    ),
)
