"""Records of accel obey the loggers that programs for Accelerate configure."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accel_core.options.engines import PUBLIC
from accel_core.tracking.steps import whole_step
from accelerate.logging import get_logger


@contextmanager
def listening(name: str) -> Iterator[tuple[logging.Logger, list[logging.LogRecord]]]:
    """Give a logger, and the list that its records come to, and put its level back."""
    logger, handler, records = logging.getLogger(name), logging.Handler(), list[logging.LogRecord]()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield logger, records
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)


@pytest.mark.parametrize("name", ["accelerate", "accelerate.tracking"])
def test_levels_and_handlers_hold_for_records_of_accel(name: str) -> None:
    """A handler on a logger of Accelerate sees what accel writes, and a level there keeps it back."""
    with listening(name) as (logger, records):
        whole_step("x")
        logger.setLevel(logging.ERROR)
        whole_step("y")
        logger.setLevel(logging.NOTSET)
        whole_step("z")
    assert [record.args for record in records] == [("x",), ("z",)]


def test_loggers_of_users_below_accelerate() -> None:
    """What `get_logger` gives for a name below `accelerate` obeys that logger."""
    with listening("accelerate") as (logger, records):
        logger.setLevel(logging.DEBUG)
        get_logger("accelerate.mine").debug("heard")
        logger.setLevel(logging.ERROR)
        get_logger("accelerate.mine").warning("kept back")
    assert [record.getMessage() for record in records] == ["[RANK 0] heard"]


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
