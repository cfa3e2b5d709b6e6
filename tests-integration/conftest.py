"""Which tests stay in one process when several run them: those that share what takes long to make."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOGETHER = (
    "faults/test_preemption.py", "interop/", "packaging/", "scripts/test_feature_scripts.py", "simulated_device/",
)  # fmt: skip
"""Folders and files; every other test is given to whichever process is free."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of each folder or file that stay together."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            name = item.path.relative_to(HERE).as_posix()
            for prefix in TOGETHER:
                if name.startswith(prefix):
                    item.add_marker(pytest.mark.xdist_group(prefix))
