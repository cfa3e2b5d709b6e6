"""Settings of DeepSpeed's own launcher."""

from accel_core.options.enums import DEEPSPEED_MULTINODE_LAUNCHERS
from accel_launch.settings.model import Setting

_LAUNCHERS = tuple(DEEPSPEED_MULTINODE_LAUNCHERS)


def _setting(key: str, help: str, choices: tuple[str, ...] = ()) -> Setting:
    return Setting(
        key, "DeepSpeed", help, choices=choices, path=("deepspeed_config", key), environment=f"ACCEL_{key.upper()}"
    )


SETTINGS: tuple[Setting, ...] = (
    _setting("deepspeed_hostfile", "File that lists hosts and their slots, for a run on several machines."),
    _setting("deepspeed_exclusion_filter", "Hosts and slots to leave out."),
    _setting("deepspeed_inclusion_filter", "Hosts and slots to use, and no others."),
    _setting("deepspeed_multinode_launcher", "How DeepSpeed starts processes on other machines.", _LAUNCHERS),
)
