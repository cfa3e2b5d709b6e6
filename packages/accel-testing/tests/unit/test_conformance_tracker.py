"""The conformance suite, passed by a tracker of a third party that writes JSON lines, and failed by one that loses."""

import dataclasses
import json
import pathlib

import pytest
import torch

from accel_core.tracking.tracker import GeneralTracker
from accel_testing.conformance.tracker import RESUMED, SCALARS, Stored, TrackerConformance


def leaves(value, path=""):
    """Return the leaves of a nest by path, numbers as they are and the rest as text."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    parts = {name: leaf for key, item in items for name, leaf in leaves(item, f"{path}/{key}").items()}
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return parts or {path: value if isinstance(value, (int, float)) else str(value)}


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
        self._write({"config": leaves(values)})

    def log(self, values, step=None, **kwargs):
        """Write numbers and texts."""
        self._write({"step": step, "values": {name[1:]: leaf for name, leaf in leaves(values).items()}})

    def finish(self):
        """Close the file."""
        if self.file is not None:
            self.file.close()

    def state_dict(self):
        """Return the file's name."""
        return {"path": self.path.name}


@pytest.mark.slow
class TestLines(TrackerConformance):
    """The suite, passed."""

    tracker_class = LinesTracker

    def read(self, folder, state):
        """Read the lines."""
        scalars, texts, config = {}, {}, {}
        for line in map(json.loads, (folder / state["path"]).read_text().splitlines()):
            if "config" in line:
                config = line["config"]
            for name, value in line.get("values", {}).items():
                place = texts if isinstance(value, str) else scalars
                place.setdefault(name, []).append((line["step"], value))
        return Stored(scalars=scalars, texts=texts, config=config)


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
