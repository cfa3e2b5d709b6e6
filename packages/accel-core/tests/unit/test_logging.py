"""Loggers in one process."""

import logging

import pytest

from accel_core.errors import StateError
from accel_core.host.environ import patch_environment
from accel_core.logging import MultiProcessAdapter, get_logger
from accel_core.process.world import ensure

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture
def root_level():
    """Put the root logger's severity back."""
    before = logging.root.level
    yield
    logging.root.setLevel(before)


def test_messages_carry_the_rank_and_the_callers_line(caplog):
    """A message begins with the rank and is recorded for the line that logged it, before and after a state exists."""
    logger = get_logger("accel.test.unit")
    with caplog.at_level("INFO", logger="accel.test.unit"):
        logger.info("first %d", 1)
        ensure(cpu=True)
        logger.info("second", main_process_only=False)
        logger.info("third", in_order=True)
    assert [record.getMessage() for record in caplog.records] == [
        f"[RANK 0] {text}" for text in ("first 1", "second", "third")
    ]
    assert {record.funcName for record in caplog.records} == {"test_messages_carry_the_rank_and_the_callers_line"}


def test_order_needs_processes():
    """Writing in order before the processes met is refused."""
    logger = get_logger("accel.test.order", log_level=None)
    with pytest.raises(StateError, match="Make one first"):
        logger.error("early", in_order=True)


def test_other_ranks_keep_silent(caplog):
    """A process that is not the main one writes only what all are to write."""
    logger = get_logger("accel.test.silent")
    with patch_environment(RANK=1, WORLD_SIZE=2), caplog.at_level("INFO", logger="accel.test.silent"):
        logger.info("main only")
        logger.info("everybody", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 1] everybody"]


def test_warnings_once(caplog):
    """The same warning is written once; another one is written too."""
    logger = get_logger("accel.test.once")
    for text in ("a", "a", "b", "a"):
        logger.warning_once(text)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] a", "[RANK 0] b"]


@pytest.mark.usefixtures("root_level")
def test_levels():
    """The level comes from the argument, else from ACCELERATE_LOG_LEVEL, else stays."""
    assert isinstance(get_logger("accel.test.level"), MultiProcessAdapter)
    assert logging.getLogger("accel.test.level").level == logging.NOTSET
    with patch_environment(ACCELERATE_LOG_LEVEL="error"):
        get_logger("accel.test.level")
        assert logging.getLogger("accel.test.level").level == logging.ERROR
        get_logger("accel.test.level", log_level="debug")
    assert logging.getLogger("accel.test.level").level == logging.DEBUG
    assert logging.root.level == logging.DEBUG
