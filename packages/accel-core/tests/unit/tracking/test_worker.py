"""Tests of the thread with a queue."""

import threading

import pytest

from accel_core.testing import limits
from accel_core.tracking import worker
from accel_core.tracking.worker import TrackerWorker


def test_jobs_in_order_until_the_last():
    """Jobs are carried out in order, the last one last, and none is taken after it."""
    done = []
    own = TrackerWorker("own")
    for number in range(100):
        assert own.put(lambda number=number: done.append(number))
    own.finish(lambda: done.append("last"))
    own.finish(lambda: done.append("another"))
    assert not own.put(lambda: done.append("late"))
    assert own.close(60)
    assert done == [*range(100), "last"]
    assert own.drain(0)


def test_an_idle_thread_is_seen_at_once():
    """Nobody waits for a thread that has nothing to do."""
    own = TrackerWorker("own")
    assert own.drain(0)
    own.put(lambda: None)
    assert own.drain(60)
    assert own.drain(0)
    own.finish(lambda: None)
    assert own.close(60)


def test_a_job_that_hangs_holds_nobody():
    """Whoever waits for a thread that hangs waits as long as they said; what waits behind it is dropped."""
    gate, done = threading.Event(), []
    own = TrackerWorker("own")
    own.put(gate.wait)
    own.put(lambda: done.append("dropped"))
    own.finish(lambda: done.append("dropped"))
    assert not own.drain(0.01)
    assert not own.close(0.01)
    gate.set()
    own._thread.join(limits.limit())
    assert done == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_is_not_waited_for():
    """A job that raises ends its thread, and nobody waits for what it leaves, whatever time they have."""
    gate = threading.Event()

    def fail():
        gate.wait(limits.limit())
        raise ValueError("a mistake")

    own = TrackerWorker("own")
    own.put(fail)
    own.put(lambda: None)
    waited = []
    waiting = threading.Thread(target=lambda: waited.append(own.drain(3600)))
    waiting.start()
    gate.set()
    waiting.join(limits.limit())
    assert waited == [False]
    assert not own.drain(3600)
    assert not own.put(lambda: None)
    assert not own.close(3600)


def test_a_full_queue_takes_nothing(monkeypatch):
    """A queue takes no job beyond its limit, and takes the last one all the same."""
    monkeypatch.setattr(worker, "MOST_WAITING", 3)
    gate, done = threading.Event(), []
    own = TrackerWorker("own")
    taken = [own.put(gate.wait), *(own.put(lambda: done.append(1)) for _ in range(4))]
    own.finish(lambda: done.append("last"))
    gate.set()
    assert own.close(60)
    assert taken == [True, True, True, False, False]
    assert done == [1, 1, "last"]
