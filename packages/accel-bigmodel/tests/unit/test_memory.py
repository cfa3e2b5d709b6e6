"""Limits of memory are bytes by device, whatever way they are written."""

from types import SimpleNamespace

import psutil
import pytest

from accel_bigmodel import get_max_memory, memory
from accel_core.errors import ConfigurationError


def test_written_limits_become_bytes_where_they_were_written() -> None:
    """Callers compare the dict they passed with the one they get, as transformers does: both hold bytes."""
    given: dict[int | str, int | str] = {"cpu": "300KB", "1": "1KiB", 0: 7}
    found = get_max_memory(given)
    assert found == {0: 7, 1: 1024, "cpu": 300_000}
    assert given == {"cpu": 300_000, "1": 1024, 0: 7}


@pytest.mark.parametrize("bad", [{"gpu": "1GB"}, {"disk": "much"}])
def test_limits_that_cannot_be_read_leave_the_rest_as_written(bad: dict[int | str, int | str]) -> None:
    """An unknown device or size is an error, and nothing of the given dict was changed."""
    given: dict[int | str, int | str] = {"cpu": "300KB", **bad}
    with pytest.raises(ConfigurationError, match=r"gpu|much"):
        get_max_memory(given)
    assert given == {"cpu": "300KB", **bad}


@pytest.mark.parametrize("integrated", [True, False])
def test_memory_that_two_devices_share_is_counted_once(integrated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An integrated accelerator has the memory of the host, as an Apple chip; another one has its own."""
    driver = SimpleNamespace(
        device_count=lambda: 1,
        mem_get_info=lambda _: (5, 8),
        get_device_properties=lambda _: SimpleNamespace(is_integrated=integrated),
    )
    monkeypatch.setattr(memory, "accelerator_module", lambda: driver)
    host = SimpleNamespace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    assert get_max_memory() == ({0: 1000} if integrated else {0: 5, "cpu": 1000})
