"""The conformance suite, passed by a tracker of a third party that writes JSON lines, and failed by one that loses."""

import json
import pathlib

import pytest

from accel_core.testing.conformance.tracker import RESUMED, SCALARS, Stored, TrackerConformance
from accel_core.tracking.flatten import flatten
from accel_core.tracking.tracker import GeneralTracker


class LinesTracker(GeneralTracker):
    """Writes every call as a line of JSON."""

    name = "lines"
    requires_logging_directory = True
    every = 1

    def __init__(self, run_name, logging_dir):
        super().__init__()
        self.path = pathlib.Path(logging_dir, f"{run_name}.jsonl")
        self.file = None
        self.count = 0

    @property
    def tracker(self):
        """The open file."""
        return self.file

    def start(self):
        """Open the file."""
        self.file = open(self.path, "a")  # noqa: SIM115 - closed by `finish`

    def _write(self, line):
        self.count += 1
        if self.count % self.every == 0:
            self.file.write(json.dumps(line) + "\n")

    def store_init_configuration(self, values):
        """Write the configuration."""
        flat = flatten(values)
        self._write({"config": flat.values, "kinds": flat.kinds})

    def log(self, values, step=None, **kwargs):
        """Write numbers and texts."""
        self._write({"step": step, "values": flatten(values).values})

    def finish(self):
        """Close the file."""
        if self.file is not None:
            self.file.close()

    def state_dict(self):
        """Return the file's name."""
        return {"path": self.path.name}


class TestLines(TrackerConformance):
    """The suite, passed."""

    tracker_class = LinesTracker

    def read(self, folder, state):
        """Read the lines."""
        scalars, texts, config, exact = {}, {}, {}, None
        for line in map(json.loads, (folder / state["path"]).read_text().splitlines()):
            if "config" in line:
                config, exact = line["config"], json.dumps({"values": line["config"], "kinds": line["kinds"]})
            for name, value in line.get("values", {}).items():
                place = texts if isinstance(value, str) else scalars
                place.setdefault(name, []).append((line["step"], value))
        return Stored(scalars=scalars, texts=texts, config=config, exact=exact)


def test_the_suite_finds_what_is_lost():
    """A tracker that loses values fails the tests of numbers and of the resume."""
    suite = TestLines()
    stored = Stored(scalars={name: series[:1] for name, series in SCALARS.items()}, config={})
    session = {"stored": stored, "state": {}, "resumed_state": {}, "failures": {"x": {"losing": "no"}}}
    for test in (suite.test_numbers_are_exact_and_at_their_step, suite.test_configuration, suite.test_nothing_failed):
        with pytest.raises(AssertionError):
            test(session)
    assert stored.scalars["loss"][-len(RESUMED) :] != RESUMED
    with pytest.raises(AssertionError):
        suite.test_resume(session)
