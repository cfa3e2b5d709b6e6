"""Which tests stay in one process when several run them, and which begin.

By a scheduler of our own and not by pytest-xdist's mark for groups: pytest 9.2 does not carry it to where it is read.
"""

from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TOGETHER = (
    "faults/test_preemption.py", "interop/", "packaging/", "scripts/test_feature_scripts.py", "simulated_device/",
)  # fmt: skip
"""Folders and files whose tests share what takes long to make; every other test goes to whichever process is free."""

SHORT = ("documentation/", "equivalence/")
"""Folders of many tests that take seconds each: they come last, where a long one would keep a single process busy."""


def _name(path: str) -> str:
    return path.removeprefix(f"{HERE.name}/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put short tests behind all others."""
    items.sort(key=lambda item: _name(item.nodeid).startswith(SHORT))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give out single tests, but those that share something to one process, the largest share first."""
    from xdist.scheduler import LoadScopeScheduling

    class Shares(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((prefix for prefix in TOGETHER if _name(nodeid).startswith(prefix)), nodeid)

    return Shares(config, log)
