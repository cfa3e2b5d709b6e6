"""Environment variables that accel reads, and those that nothing reads."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from accel_core.options.fp8 import Fp8Options
from accel_core.options.option import options_of
from accel_launch.settings.table import ALL

_PREFIXES = ("ACCEL_", "ACCELERATE_")

_BESIDE_SETTINGS = {
    "ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_INIT_INCLUDE_BUFFERS",
    "ACCELERATE_DEBUG_RDV_FILE", "ACCELERATE_DEBUG_TIMEOUT", "ACCELERATE_ENABLE_RICH", "ACCELERATE_LOG_LEVEL",
    "ACCELERATE_DOWNCAST_BF16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "ACCELERATE_USE_SAGEMAKER",
    "ACCELERATE_RUNTIME", "ACCELERATE_STRATEGY", "ACCELERATE_TORCH_DEVICE",
    "ACCELERATE_TRACKER_POLICY",
    "ACCEL_HEARTBEAT", "ACCEL_RESTORE_POSITION", "ACCEL_RUN_CARD", "ACCEL_RUN_ID", "ACCEL_SLURM_JOB",
    "ACCEL_REPLICA", "ACCEL_REPLICA_COUNT", "ACCEL_REPLICA_HOSTS", "ACCEL_REPLICA_LIFE", "ACCEL_REPLICA_MIN",
    "ACCEL_REPLICA_STORE",
}  # fmt: skip
"""Variables that no flag of `accel launch` sets."""

KNOWN: frozenset[str] = frozenset(
    {setting.environment for setting in ALL if setting.environment}
    | {option.environment for option in options_of(Fp8Options)}
    | _BESIDE_SETTINGS
)
"""Every variable that accel reads or sets under a name of its own."""


def unread(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each variable under accel's own names that nothing reads, with the one that was probably meant."""
    for name in sorted(environment):
        if name.startswith(_PREFIXES) and name not in KNOWN:
            yield name, next(iter(get_close_matches(name, sorted(KNOWN), n=1, cutoff=0.88)), "")
