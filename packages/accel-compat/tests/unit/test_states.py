"""States and plugins, as only Accelerate's names ask for them."""

import threading
from types import SimpleNamespace

import pytest

from accel_core.errors import StateError
from accel_core.options.enums import DistributedType
from accel_testing import requires
from accelerate._states import ThreadLocalSharedDict, get_active_deepspeed_plugin


@requires("engine:deepspeed")
def test_the_plugin_in_use_is_found() -> None:
    """The selected plugin of several is the one in use; without DeepSpeed there is none."""
    from accel_deepspeed.plugin import DeepSpeedPlugin

    first, second = DeepSpeedPlugin(), DeepSpeedPlugin(zero_stage=3)
    second._selected = True
    several = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, deepspeed_plugins={"first": first, "second": second}
    )
    assert get_active_deepspeed_plugin(several) is second
    none = SimpleNamespace(distributed_type=DistributedType.NO, deepspeed_plugins=None)
    with pytest.raises(StateError, match="No DeepSpeed plugin"):
        get_active_deepspeed_plugin(none)


def test_each_thread_has_its_own_dictionary() -> None:
    """What one thread puts in, another does not see."""

    class Holder:
        shared = ThreadLocalSharedDict()

    Holder().shared["key"] = 1
    seen: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: seen.append(dict(Holder().shared)))
    thread.start()
    thread.join()
    assert seen == [{}]
    assert Holder().shared == {"key": 1}
