"""Every setting of `accel launch`, in one table."""

from accel_launch.settings.engines import ENGINES
from accel_launch.settings.model import LAUNCH, Setting

__all__ = ["ALL", "BY_KEY", "BY_PATH"]

ALL: tuple[Setting, ...] = (
    *LAUNCH,
    *(setting for setting in ENGINES if setting.key not in {known.key for known in LAUNCH}),
)
"""All settings; a key may have a second row for the flag that turns it off."""

BY_KEY: dict[str, Setting] = {}
for _setting in ALL:
    BY_KEY.setdefault(_setting.key, _setting)

BY_PATH: dict[tuple[str, ...], Setting] = {setting.path: setting for setting in BY_KEY.values() if setting.path}
"""Settings by the keys that lead to them in a configuration file."""
