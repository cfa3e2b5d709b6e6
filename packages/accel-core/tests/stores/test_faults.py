"""Each request of a save or load fails once, or its process is killed there: the old checkpoint or the new one."""

import os
import signal
from pathlib import Path

import pytest
from small_run import build, save_when_told, set_to, stored, values
from store_server import FAULTS, KIND, FaultyProxy, settings

from accel_core.checkpoint.address import Address, address_of
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.remote.store import Store
from accel_core.checkpoint.save import save_state
from accel_core.errors import CheckpointError, ConfigurationError
from accel_testing.world import server as forking

FAULTS_BY_TIER = [
    pytest.param(fault, marks=pytest.mark.full("another case of a grid")) if fault in ("delay", "reset") else fault
    for fault in FAULTS
]


def requests_of_a_save(s3: FaultyProxy, address: str) -> int:
    """Return how many requests a save over an older one makes, after making it."""
    run = build(1.0)
    save_state(run, address)
    set_to(run, 2.0)
    s3.begin()
    save_state(run, address)
    return len(s3.seen)


@pytest.mark.parametrize("fault", FAULTS_BY_TIER)
def test_a_save_survives_the_fault_of_any_request(s3: FaultyProxy, bucket: str, fault: str) -> None:
    """A request that fails once is made again: the save returns, and what is loaded is the new one, whole."""
    count = requests_of_a_save(s3, f"{bucket}/count")
    run = build(1.0)
    for at in range(count):
        set_to(run, at + 2.0)
        s3.begin(fault, at)
        save_state(run, f"{bucket}/run")
        s3.begin()
        assert stored(f"{bucket}/run") == {at + 2.0}, at


@pytest.mark.parametrize("fault", FAULTS_BY_TIER)
def test_a_load_survives_the_fault_of_any_request(s3: FaultyProxy, bucket: str, fault: str) -> None:
    """A request of a load that fails once is made again, and what is loaded is whole."""
    save_state(build(3.0), f"{bucket}/run")
    s3.begin()
    stored(f"{bucket}/run")
    for at in range(len(s3.seen)):
        s3.begin(fault, at)
        assert stored(f"{bucket}/run") == {3.0}, at


@pytest.mark.parametrize("fault", ["500", "lost"])
def test_a_store_that_fails_for_good_leaves_the_old_or_the_new(s3: FaultyProxy, bucket: str, fault: str) -> None:
    """Where all requests fail from one on, a save that raises leaves one checkpoint whole, and the next one works."""
    count = requests_of_a_save(s3, f"{bucket}/count")
    run = build(1.0)
    save_state(run, f"{bucket}/run")
    old, outcomes = 1.0, set()
    for at in range(count):
        new = at + 2.0
        set_to(run, new)
        s3.begin(fault, at, lasting=True)
        try:
            save_state(run, f"{bucket}/run")
            outcome = "returned"
        except (CheckpointError, ConfigurationError):
            outcome = "raised"
        s3.begin()
        found = stored(f"{bucket}/run")
        # A put whose answer is lost may be done: then the new one counts, although the save could not say so.
        assert found == {new} if outcome == "returned" else found in ({old}, {new}), (at, found)
        outcomes.add((outcome, found == {new}))
        (old,) = found
    assert {("raised", False), ("returned", True)} <= outcomes


class Killed:
    """A run that is saved by processes which are killed."""

    def __init__(self, s3: FaultyProxy, address: str, temporary: Path) -> None:
        self.s3, self.address, self.run, self.value = s3, address, build(1.0), 1.0
        save_state(self.run, address)
        context = forking()
        self.here, there = context.Pipe()
        # The server that processes are forked from may have begun before the store.
        variables = {**settings(s3), "ACCEL_TEST_STORE": KIND}
        arguments = (address, str(temporary), variables, there)
        self.child = context.Process(target=save_when_told, args=arguments)
        self.child.start()

    def save(self, fault: str, at: int) -> tuple[bool, bool]:
        """Kill a save at a request; return whether it was killed, and whether the new checkpoint counts."""
        new = self.value + 1.0
        self.here.send(new)
        self.s3.begin(fault, at, process=self.here.recv())
        self.here.send(None)
        status = self.here.recv()
        assert status in (0, signal.SIGKILL)
        seen = list(self.s3.seen)
        self.s3.begin()
        found = stored(self.address)
        assert found in ({self.value}, {new}), (fault, at)
        changed = found == {new}
        (self.value,) = found
        self.s3.seen = seen
        return status == signal.SIGKILL, changed

    def end(self, temporary: Path) -> None:
        """Save in this process: nothing of what was killed stays."""
        self.here.send(None)
        self.child.join()
        set_to(self.run, 77.0)
        save_state(self.run, self.address)
        assert stored(self.address) == {77.0}
        assert not list((temporary / f"accel-{os.getuid()}").iterdir())
        found = address_of(self.address)
        assert isinstance(found, Address)
        # The commit and its folder. Folders without objects, which SeaweedFS lists for a while, do not count.
        assert len({name.split("/")[0] for name in Store(found).sizes("")}) == 2


def test_a_kill_around_the_commit_leaves_the_old_or_the_new(s3: FaultyProxy, bucket: str, tmp_path: Path) -> None:
    """Before the commit arrives, a kill leaves the old checkpoint; from when it was done on, the new one."""
    killed = Killed(s3, f"{bucket}/run", tmp_path)
    assert killed.save("", -1) == (False, True)
    commit = next(at for at, (method, path, _) in enumerate(s3.seen) if method[0] == "P" and "accel_commit" in path)
    assert killed.save("killed", commit - 1) == (True, False)
    assert killed.save("kill", commit) == (True, False)
    assert killed.save("killed", commit) == (True, True)
    assert killed.save("kill", commit + 1) == (True, True)
    killed.end(tmp_path)


@pytest.mark.full("another case of a grid")
@pytest.mark.parametrize("fault", ["kill", "killed"])
def test_a_kill_at_any_request_leaves_the_old_or_the_new(
    s3: FaultyProxy, bucket: str, tmp_path: Path, fault: str
) -> None:
    """A process that is killed before or after any request of a save leaves the old checkpoint or the new one."""
    killed, at, changed = Killed(s3, f"{bucket}/run", tmp_path), 0, 0
    while (outcome := killed.save(fault, at))[0]:
        at, changed = at + 1, changed + outcome[1]
    assert 0 < changed < at
    killed.end(tmp_path)


def test_a_load_that_cannot_read_changes_nothing(s3: FaultyProxy, bucket: str) -> None:
    """Where all requests fail from one on, a load raises and the run is what it was."""
    save_state(build(3.0), f"{bucket}/run")
    failures, run = [], build(5.0)
    for at in range(100):  # libraries make one request more or less from load to load
        s3.begin("500", at, lasting=True)
        try:
            load_state(run, f"{bucket}/run")
        except CheckpointError as error:
            failures.append(str(error))
        else:
            break
        assert values(run) == {5.0}
    assert values(run) == {3.0}
    assert 3 < len(failures) == at
    assert len(s3.seen) <= at  # the load that gave no error met no failing request
    assert all("failed 6 times" in each for each in failures)
