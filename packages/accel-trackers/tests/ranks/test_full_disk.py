"""Runs whose spool lies on a disk without room."""

import sys

import pytest

from accel_core.testing import limits
from accel_trackers import spool

FULL = """
import resource, sys
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker

class Listing(GeneralTracker):
    name = "listing"
    requires_logging_directory = False
    tracker = None
    values = []
    def log(self, values, step=None, **kwargs):
        if step % 2:
            raise ConnectionError("no network")
        self.values.append(step)

folder, size, room = sys.argv[1:]
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
hub = TrackerHub(Listing(), settings=TrackerKwargs(spool_dir=folder, drain_seconds=3600))
if size == "0":
    limit(0)
hub.init("project")
limit(int(size))
for step in range(100):
    if step == 90 and room == "again":
        hub._distributor.drain(60)
        hub._recorder.drain(60)
        limit(limits[0])
    hub.log({"loss": step}, step=step)
hub.finish()
assert Listing.values == list(range(0, 100, 2)), Listing.values
"""


@pytest.mark.parametrize(("size", "room"), [(0, "never"), (300, "again"), (5000, "never")])
def test_a_full_disk_neither_stops_nor_ends_a_run(tmp_path, size, room):
    """Where no byte more can be written, trackers get everything, the end is an end, and what is lost is told."""
    done = limits.run([sys.executable, "-c", FULL, str(tmp_path), str(size), room], quiet=10)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("No spool file can be written" if size == 0 else "cannot be written (") == 1
    assert "are lost (listing: " in done.stderr
    if size == 0:
        assert list(tmp_path.iterdir()) == []
        return
    (path,) = spool.find(tmp_path)
    kept = [entry["step"] for entry in spool.read(path).unsent("listing")]
    lost = int(done.stderr.partition("are lost (listing: ")[2].partition(")")[0])
    failed = [step for step in range(100) if step % 2]
    assert len([step for step in kept if step in failed]) == len(failed) - lost
    assert room == "never" or kept[-5:] == failed[-5:]
