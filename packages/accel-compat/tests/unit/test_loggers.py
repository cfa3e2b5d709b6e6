"""Records of accel obey the loggers that programs for Accelerate configure."""

import importlib
import logging

import pytest

from accel_core.options.engines import PUBLIC
from accel_core.tracking.steps import whole_step
from accelerate.logging import get_logger


class Keeping(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)


@pytest.mark.parametrize("name", ["accelerate", "accelerate.tracking"])
def test_levels_and_handlers_hold_for_records_of_accel(name: str) -> None:
    """A handler on a logger of Accelerate sees what accel writes, and a level there keeps it back."""
    logger, handler = logging.getLogger(name), Keeping()
    logger.addHandler(handler)
    try:
        whole_step("x")
        logger.setLevel(logging.ERROR)
        whole_step("y")
        logger.setLevel(logging.NOTSET)
        whole_step("z")
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    assert [record.args for record in handler.records] == [("x",), ("z",)]


def test_loggers_of_users_below_accelerate() -> None:
    """What `get_logger` gives for a name below `accelerate` obeys that logger."""
    logger, handler = logging.getLogger("accelerate"), Keeping()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        get_logger("accelerate.mine").debug("heard")
        logger.setLevel(logging.ERROR)
        get_logger("accelerate.mine").warning("kept back")
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
    assert [record.getMessage() for record in handler.records] == ["[RANK 0] heard"]


def test_every_package_answers_to_accelerate() -> None:
    """Every module of accel that writes records has `accelerate` above it, imported before or after the drop-in."""
    for module in ("accel_bigmodel.dispatch", "accel_quant.load", "accel_trackers.show"):
        importlib.import_module(module)
    for module in ("accel_core", "accel_torchft", *(known.module for known in PUBLIC)):
        logging.getLogger(f"{module}.made.later")
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("accel_") and isinstance(logger, logging.Logger)
    ]
    for logger in loggers:
        above: list[logging.Logger | None] = [logger]
        while above[-1] is not None:
            above.append(above[-1].parent)
        assert logging.getLogger("accelerate") in above, logger.name
    written = {logger.name for logger in loggers}
    assert {"accel_core.made.later", "accel_core.tracking.hub", "accel_quant.load", "accel_trackers"} <= written
