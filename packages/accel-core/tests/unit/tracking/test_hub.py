"""Tests of the hub: queues, what is not delivered, policy, steps, resume, other ranks."""

import dataclasses
import json
import logging
import signal
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from accel_core.errors import ConfigurationError, TrackerError, UnsupportedTypeError
from accel_core.tracking import discovery, queues
from accel_core.tracking.handle import NULL_RUN
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.snapshot import snapshot
from accel_core.tracking.tracker import GeneralTracker
from accel_testing import limits


class Keeping(GeneralTracker):
    """Keeps every call."""

    name = "keeping"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.calls = []
        self.threads = set()

    @property
    def tracker(self):
        """The list of calls."""
        return self.calls

    def keep(self, *call):
        """Keep one call."""
        self.threads.add(threading.current_thread().name)
        self.calls.append(call)

    def start(self):
        """Keep the call."""
        self.keep("start")

    def store_init_configuration(self, values):
        """Keep the call."""
        self.keep("config", values)

    def log(self, values, step=None, **kwargs):
        """Keep the call."""
        self.keep("log", values, step, kwargs)

    def log_images(self, values, step=None, **kwargs):
        """Keep the call."""
        self.keep("images", values, step, kwargs)

    def log_artifact(self, local_path, artifact_path=None):
        """Keep the file's content."""
        with open(local_path) as file:
            self.keep("artifact", file.read(), artifact_path)

    def finish(self):
        """Keep the call."""
        self.keep("finish")

    def state_dict(self):
        """Return an id."""
        return {"id": "abc"}

    def load_state_dict(self, state):
        """Keep the call."""
        self.keep("load", dict(state))

    def logged(self):
        """Return steps and values in order."""
        return [(call[2], call[1]) for call in self.calls if call[0] == "log"]


class Raising(Keeping):
    """Raises at every call that reaches the library."""

    name = "raising"

    def keep(self, *call):
        """Raise."""
        raise ConnectionError("no network")


class Held(Keeping):
    """Blocks in `log` until it is let go."""

    name = "held"

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def log(self, values, step=None, **kwargs):
        """Wait, then keep the call."""
        self.gate.wait(limits.limit())
        self.keep("log", values, step, kwargs)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _undelivered(hub):
    """Return the lines of the file that a run left: tracker, method, step and first argument."""
    lines = map(json.loads, Path(f"undelivered-{hub.run_id}.jsonl").read_text().splitlines())
    return [(line["tracker"], line["method"], line["step"], *line["args"]) for line in lines]


class Named(Keeping):
    """Is asked for by its name, and keeps the one that was made."""

    name = "named"
    made = []

    def __init__(self, project):
        super().__init__()
        self.made.append(self)


@pytest.fixture
def named():
    """Offer a tracker by its name; return the list of those that are made."""
    discovery.register_tracker_class(Named)
    yield Named.made
    Named.made.clear()
    del discovery.LOGGER_TYPE_TO_CLASS["named"]


def _hub(*trackers, **kwargs):
    return TrackerHub(list(trackers), settings=TrackerKwargs(**kwargs))


@contextmanager
def _running(*trackers, config=None, **kwargs):
    """Give the hub of a run, from its start to its end."""
    hub = _hub(*trackers, **kwargs)
    hub.init("project", config)
    yield hub
    hub.finish()


def test_calls_arrive_in_order_in_one_thread():
    """What is logged arrives as given, in order, in the tracker's own thread; nothing comes after the first end."""
    tracker = Keeping()
    with _running(tracker, config={"lr": 0.1, "nested": {"a": [1, None]}}) as hub:
        for step in range(3):
            hub.log({"loss": step * 0.5}, step=step, log_kwargs={"keeping": {"extra": step}, "other": {"x": 1}})
    hub.finish()
    hub.log({"late": 1})
    assert tracker.calls == [
        ("start",),
        ("config", {"lr": 0.1, "nested": {"a": [1, None]}}),
        *[("log", {"loss": step * 0.5}, step, {"extra": step}) for step in range(3)],
        ("finish",),
    ]
    assert tracker.threads == {"tracker-keeping"}


def test_values_are_copied_when_logged(tmp_path):
    """What a training step changes in place after logging is not what is logged."""
    tracker = Held()
    with _running(tracker) as hub:
        total, history = torch.zeros(()), [1]
        hub.log({"total": total, "history": history}, step=0)
        total += 7
        history.append(2)
        tracker.gate.set()
    assert tracker.logged() == [(0, {"total": torch.tensor(0.0), "history": [1]})]


class Uncopied(dict):
    """A mapping that refuses to be copied."""

    def __copy__(self):
        """Refuse."""
        raise TypeError("no copies")


@dataclasses.dataclass
class Meter:
    """What a loop goes on counting in."""

    count: int


@pytest.mark.parametrize(
    ("value", "changed"),
    [
        (Counter(a=1), lambda value: value.update("a")),
        (defaultdict(list, a=[1]), lambda value: value["a"].append(2)),
        (OrderedDict(a=torch.ones(1)), lambda value: value["a"].zero_()),
        ({1, 2}, set.clear),
        (deque([1, 2]), deque.clear),
        (bytearray(b"ab"), bytearray.clear),
        (Meter(1), lambda value: setattr(value, "count", 2)),
    ],
)
def test_containers_of_every_class_are_copied(value, changed):
    """A loop that clears its counter after it logged it changes nothing of what was logged; the class stays."""
    before, refusing = repr(value), Uncopied(a=1)
    copied, same = snapshot({"inner": [value, refusing]})["inner"]
    changed(value)
    assert type(copied) is type(value)
    assert repr(copied) == before != repr(value)
    assert same is refusing, "logging does not raise for a class that refuses to be copied"


def test_a_blocked_tracker_does_not_hold_the_run(caplog):
    """Steps and end go on while a tracker is blocked, the others get everything, and what it did not take is told."""
    held, good = Held(), Keeping()
    with _running(held, good, drain_seconds=0.2) as hub:
        for step in range(100):
            hub.log({"loss": float(step)}, step=step)
    taken = len(held.logged())
    held.gate.set()
    assert good.logged() == [(step, {"loss": float(step)}) for step in range(100)]
    assert taken == 0
    assert _undelivered(hub) == [("held", "log", step, {"loss": float(step)}) for step in range(100)]
    assert caplog.text.count(f"did not take are in undelivered-{hub.run_id}.jsonl (held: 100).") == 1


def test_warn_goes_on_past_a_raising_tracker(caplog):
    """What a raising tracker does not take is kept as it comes, and told once; no other tracker misses a value."""
    good = Keeping()
    with _running(Raising(), good, config={"a": 1}) as hub:
        for step in range(5):
            hub.log({"loss": torch.tensor(step / 4), "text": "x"}, step=step)
    assert good.logged() == [(step, {"loss": torch.tensor(step / 4), "text": "x"}) for step in range(5)]
    assert "failed in `start` (ConnectionError: no network)" in caplog.text
    assert hub.failures == {"raising": "RuntimeError: the tracker did not start"}
    assert _undelivered(hub) == [
        ("raising", "store_init_configuration", None, {"a": 1}),
        *[("raising", "log", step, {"loss": step / 4, "text": "x"}) for step in range(5)],
    ]
    assert caplog.text.count("failed in") == caplog.text.count("(raising: 6)") == 1


class Unreadable(Exception):
    """Raises when it is asked for its message."""

    def __str__(self):
        raise ValueError("no message")


class Ending(BaseException):
    """No Exception, as what ends a greenlet is."""


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), Ending("now"), Unreadable()])
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_whatever_a_tracker_raises_is_a_failure(caplog, raised, method):
    """What would end a thread ends neither the tracker's nor the run: every call is made, and nobody waits for it."""
    calls = []

    class Ended(Keeping):
        """Raises in one method."""

        name = "ended"

        def keep(self, *call):
            """Count the call, and raise where asked to."""
            calls.append(call[0])
            if call[0] == method:
                raise raised

    good = Keeping()
    with _running(Ended(), good, start_seconds=3600, drain_seconds=3600) as hub:
        for step in range(3):
            hub.log({"loss": step}, step=step)
    assert calls == (["start"] if method == "start" else ["start", "log", "log", "log", "finish"])
    assert good.logged() == [(step, {"loss": step}) for step in range(3)]
    assert type(raised).__name__ in caplog.text
    assert ("are in" in caplog.text) == (method != "finish")


def test_ctrl_c_in_the_users_thread_goes_on():
    """KeyboardInterrupt while a tracker starts in the thread that called is the user's, and is not swallowed."""

    class Here(Keeping):
        """Starts in the thread that called."""

        starts_on_caller = True

        def start(self):
            """Be interrupted."""
            raise KeyboardInterrupt

    hub = _hub(Here())
    with pytest.raises(KeyboardInterrupt):
        hub.init("project")
    hub.finish()


def test_a_full_queue_warns_once_and_is_counted(monkeypatch, caplog):
    """What a full queue does not take is told when it begins, and counted at the end; it is waited for once."""
    monkeypatch.setattr(queues, "MOST_WAITING", 5)
    held = Held()
    with _running(held, drain_seconds=30) as hub:
        for step in range(20):
            hub.log({"loss": float(step)}, step=step)
        assert hub._queues["held"].late
        held.gate.set()
    assert [step for step, _ in held.logged()] == list(range(5))
    assert caplog.text.count("The queue of the tracker 'held' is full") == 1
    assert "are lost (held: 15)" in caplog.text


def test_a_queue_that_gets_room_loses_nothing(monkeypatch, caplog):
    """A loop that does nothing but log waits for a tracker that goes on."""
    monkeypatch.setattr(queues, "MOST_WAITING", 5)
    tracker = Keeping()
    with _running(tracker) as hub:
        for step in range(200):
            hub.log({"loss": step}, step=step)
    assert [step for step, _ in tracker.logged()] == list(range(200))
    assert caplog.text == ""


class Odd:
    """Raises when its text is asked for."""

    def __str__(self):
        raise ValueError("no text")


def test_what_is_kept_is_json(tmp_path, caplog):
    """Tensors and arrays are numbers and lists, other values texts; what cannot be written is counted and told."""
    hub = TrackerHub(Raising(), tmp_path / "logs")
    hub.init("project")
    hub.log({"one": torch.ones(1), "many": torch.arange(2), "set": {1}, "dtype": torch.int8, "none": None}, step=0)
    hub.log({"odd": Odd()}, step=1)
    hub.finish()
    (line,) = map(json.loads, (tmp_path / "logs" / f"undelivered-{hub.run_id}.jsonl").read_text().splitlines())
    assert line["args"] == [{"one": 1.0, "many": [0, 1], "set": [1], "dtype": "torch.int8", "none": None}]
    assert (line["project"], line["run"], line["kwargs"]) == ("project", hub.run_id, {"step": 0})
    assert "are lost (raising: 1): ValueError: no text." in caplog.text


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    """Where there is no place for the file, the run ends as always, and the end says what is lost."""
    (tmp_path / "file").touch()
    good = Keeping()
    hub = TrackerHub([Raising(), good], tmp_path / "file")
    hub.init("project")
    hub.log({"loss": 1}, step=0)
    hub.finish()
    assert good.logged() == [(0, {"loss": 1})]
    assert "are lost (raising: 1): FileExistsError" in caplog.text


KILLED = """
import os, time
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.tracker import GeneralTracker

class Down(GeneralTracker):
    name, requires_logging_directory, tracker = "down", False, None
    def log(self, values, step=None, **kwargs):
        if step == 3:
            time.sleep(3600)
        raise ConnectionError("no network")

hub = TrackerHub(Down())
hub.init("project")
for step in range(5):
    hub.log({"loss": step}, step=step)
while len(hub._queues["down"]._waiting) > 2:
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_what_failed(tmp_path):
    """What a tracker refused is on disk at once; only what waited in the queue is lost."""
    done = limits.run([sys.executable, "-c", KILLED])
    assert done.returncode == -signal.SIGKILL, done.stderr
    (path,) = tmp_path.glob("undelivered-*.jsonl")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_trackers_do_not_share_what_they_are_given():
    """A tracker that changes the values it is given changes nobody else's; two of one name both get every value."""

    class Taking(Keeping):
        """Empties what it is given."""

        name = "taking"

        def log(self, values, step=None, **kwargs):
            """Change all of it."""
            values.pop("loss").zero_()
            values["nested"].clear()

    first, second = Keeping(), Keeping()
    with _running(Taking(), first, second) as hub:
        hub.log({"loss": torch.ones(()), "nested": {"a": 1}}, step=0)
        assert hub.get("keeping") is first
        assert hub.get("keeping#2") is second
    assert first.logged() == second.logged() == [(0, {"loss": torch.ones(()), "nested": {"a": 1}})]


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (ConnectionError("no network"), "ConnectionError: no network"),
        (Unreadable(), r"Unreadable \(its message cannot be read: ValueError\)"),
    ],
)
def test_raise_comes_with_the_next_call(raised, shown):
    """With the policy `raise` the tracker's own error, even if nobody can read it, is the cause of ours."""

    class Late(Keeping):
        """Raises when it logs."""

        def log(self, values, step=None, **kwargs):
            """Raise."""
            raise raised

    hub = _hub(Late(), policy="raise")
    hub.init("project")
    hub.log({"loss": 1.0}, step=0)
    with pytest.raises(TrackerError, match=f"'keeping' failed in `log`; it raised {shown}") as info:
        hub.finish()
    assert info.value.__cause__ is raised
    assert not hub.running
    hub = _hub(Raising(), policy="raise")
    with pytest.raises(TrackerError, match="failed in `start`"):
        hub.init("project")
    hub.finish()


def test_off_is_silent_and_keeps_nothing(tmp_path, caplog):
    """With the policy `off` a failing tracker is switched off; the others go on and nothing is told."""
    good = Keeping()
    with _running(Raising(), good, policy="off") as hub:
        for step in range(3):
            hub.log({"loss": 1.0}, step=step)
    assert len(good.logged()) == 3
    assert caplog.text == ""


def test_policy_comes_from_the_environment(monkeypatch):
    """The environment names the policy where the code does not; an unknown one is named, with those there are."""
    monkeypatch.setenv("ACCELERATE_TRACKER_POLICY", "raise")
    assert TrackerHub().settings.policy == "raise"
    assert _hub(policy="off").settings.policy == "off"
    monkeypatch.setenv("ACCELERATE_TRACKER_POLICY", "")
    assert TrackerHub().settings.policy == "warn"
    with pytest.raises(ConfigurationError, match=r"got 'explode'\. Use one of \['raise', 'warn', 'off'\]"):
        TrackerKwargs(policy="explode")


def test_other_ranks_hold_trackers_that_do_nothing(tmp_path):
    """A null tracker has the class, the name and the attributes, and takes no call."""
    tracker = Keeping()
    hub = TrackerHub([tracker], tmp_path, is_main=False)
    hub.init("project", {"a": 1})
    hub.log({"loss": 1.0}, step=0)
    (null,) = hub.trackers
    assert isinstance(null, Keeping)
    assert null.name == "keeping"
    assert null.log({"x": 1}) is None
    assert null.log_images({"x": 1}, step=1) is None
    assert null.tracker.anything["goes"](1).here is NULL_RUN
    assert null.writer.add_images("x", [1]) is NULL_RUN
    assert hub.get("keeping") is null
    assert hub.get("keeping", unwrap=True) is NULL_RUN
    hub.finish()
    assert tracker.calls == []
    assert list(tmp_path.iterdir()) == []


def test_handle_is_the_tracker_to_its_users(named):
    """`isinstance`, attributes, setting and unwrapping reach the tracker; logging calls go through the hub."""
    hub = TrackerHub("named")
    hub.init("project")
    (tracker,) = named
    handle = hub.get("named")
    assert isinstance(handle, Named)
    assert hub.get("named", unwrap=True) is tracker.calls
    handle.log({"direct": 1}, step=4, kind="x")
    handle.log_images({"image": torch.zeros(1)}, step=5)
    handle.note = "written"
    assert tracker.note == "written"
    assert handle.calls is tracker.calls
    with pytest.raises(AttributeError, match="missing"):
        _ = handle.missing
    hub.finish()
    assert ("log", {"direct": 1}, 4, {"kind": "x"}) in tracker.calls
    assert tracker.threads == {"tracker-named"}


def test_a_file_may_be_removed_when_it_is_logged(tmp_path, named, caplog):
    """The tracker has the file when the call returns; one that is not there fails like a tracker fails."""
    with _running("named") as hub:
        file = tmp_path / "notes.txt"
        file.write_text("hello")
        hub.get("named").log_artifact(str(file), artifact_path="docs")
        file.unlink()
        assert caplog.text == ""
        hub.get("named").log_artifact(str(file))
    assert ("artifact", "hello", "docs") in named[0].calls
    assert "log_artifact" in caplog.text


def test_a_tracker_object_is_what_is_given_back():
    """An object given in `log_with` is in `trackers` and comes from `get`, once it has what was logged."""
    tracker = Held()
    with _running(tracker) as hub:
        assert hub.trackers == [tracker]
        hub.log({"a": 1}, step=0)
        threading.Timer(0.05, tracker.gate.set).start()
        assert hub.get("held") is tracker
        assert tracker.logged() == [(0, {"a": 1})]
        assert hub.get("held", unwrap=True) is tracker.calls
        tracker.log_images({"image": 1}, step=1)
        assert ("images", {"image": 1}, 1, {}) in tracker.calls


def test_a_run_without_trackers_gives_one_that_does_nothing():
    """A script whose tracker was skipped goes on; one that forgot `init_trackers`, or asks for another, is told."""
    hub = TrackerHub()
    hub.init("run")
    tracker = hub.get("wandb")
    assert isinstance(tracker, GeneralTracker)
    assert tracker.log({"loss": 1.0}) is None
    assert hub.get("wandb", unwrap=True) is NULL_RUN
    with pytest.raises(ConfigurationError, match="running are none"):
        TrackerHub(Keeping()).get("keeping")
    with (
        _running(Keeping()) as hub,
        pytest.raises(ConfigurationError, match=r"No tracker 'wandb' is running; running are \['keeping'\]"),
    ):
        hub.get("wandb")


@pytest.mark.parametrize("values", [3, "loss", [("loss", 1)], None])
def test_values_have_to_be_a_mapping(tmp_path, values):
    """Values that are not named are an error that says how to name them, and nothing is logged."""
    tracker = Keeping()
    hub = _hub(tracker)
    hub.init("project")
    with pytest.raises(UnsupportedTypeError, match="map names to values"):
        hub.log(values)
    hub.finish()
    assert tracker.logged() == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [(torch.tensor(3), 3), (4.0, 4), (None, None), ("x", None), (1.5, None), (float("nan"), None), (10**30, None)],
)
def test_step_is_a_whole_number(tmp_path, given, expected):
    """Steps of other types are read as whole numbers, or left out with a warning; the values are logged."""
    tracker = Keeping()
    with _running(tracker) as hub:
        hub.log({"a": 1}, step=given)
    assert tracker.logged() == [(expected, {"a": 1})]


def test_trackers_that_cannot_count_get_a_step(tmp_path):
    """Where the user gives no step, a tracker that asks for one gets the run's next, others get None."""

    class Counting(Keeping):
        """Cannot count."""

        name = "counting"
        fills_step = True

    plain, counting = Keeping(), Counting()
    with _running(plain, counting) as hub:
        hub.log({"a": 1})
        hub.log({"a": 2})
        hub.log({"a": 3}, step=10)
        hub.log({"b": 4})
    assert [step for step, _ in plain.logged()] == [None, None, 10, None]
    assert [step for step, _ in counting.logged()] == [0, 1, 10, 10]


def test_resume_goes_on_with_run_and_steps(tmp_path, caplog):
    """The run's id and its steps come back from a checkpoint, through JSON, before or after `init`."""
    first = Keeping()
    with _running(first) as hub:
        for step in range(5):
            hub.log({"loss": 1.0, "acc": 0.5}, step=step)
        state = json.loads(json.dumps(hub.state_dict()))

    before, after = Keeping(), Keeping()
    early, late = _hub(before), _hub(after)
    early.load_state_dict(state)
    early.init("project")
    late.init("project")
    late.load_state_dict(state)
    assert early.run_id == late.run_id == state["run_id"]
    for resumed in (early, late):
        resumed.log({"loss": 2.0}, step=0)
        resumed.log({"loss": 3.0}, step=1)
        resumed.log({"acc": 4.0}, step=5)
        resumed.finish()
    assert before.calls[:2] == [("load", {"id": "abc", "step": 4}), ("start",)]
    assert after.calls[:2] == [("start",), ("load", {"id": "abc", "step": 4})]
    for tracker in (before, after):
        assert tracker.logged() == [(5, {"loss": 2.0}), (6, {"loss": 3.0}), (5, {"acc": 4.0})]
    assert "'loss' start at 0 after a resume at 4" in caplog.text


def test_logging_dir_that_cannot_be_made(tmp_path):
    """A folder that cannot be made is an error before any tracker starts."""

    class Writing(Keeping):
        """Writes to a folder."""

        requires_logging_directory = True

    file = tmp_path / "file"
    file.write_text("")
    tracker = Writing()
    hub = TrackerHub(tracker, file / "logs")
    with pytest.raises(NotADirectoryError, match="file/logs"):
        hub.init("project")
    assert tracker.calls == []
    assert not hub.running


def test_slow_start_does_not_hold_the_run(tmp_path, caplog):
    """A tracker that is still starting gets everything once it is there."""
    gate = threading.Event()

    class Starting(Keeping):
        """Starts when it is let."""

        def start(self):
            """Wait."""
            gate.wait(limits.limit())

    tracker = Starting()
    hub = _hub(tracker, start_seconds=0.05)
    with caplog.at_level(logging.WARNING):
        hub.init("project", {"a": 1})
    hub.log({"b": 2}, step=0)
    gate.set()
    hub.finish()
    assert [call[0] for call in tracker.calls] == ["config", "log", "finish"]
    assert "did not start within" in caplog.text


def test_trackers_are_exchanged_while_the_run_goes_on() -> None:
    """Objects in a list that is set begin a run, one that is left out is finished; `log_with` is for the next run."""
    first, second, later = Keeping(), Keeping(), Keeping()
    hub = TrackerHub()
    hub.trackers = [first]
    hub.log({"a": 1})
    hub.trackers = [*hub.trackers, second]
    hub.log({"a": 2})
    hub.trackers = hub.trackers[1:]
    hub.log({"a": 3})
    assert hub.trackers == [second]
    hub.log_with = later
    hub.init("run")
    hub.log({"a": 4})
    hub.finish()
    values = [[call[1]["a"] for call in each.calls if call[0] == "log"] for each in (first, second, later)]
    assert values == [[1, 2], [2, 3], [4]]
    assert ("finish",) in first.calls
    with pytest.raises(ConfigurationError, match="No tracker is named"):
        hub.log_with = "nonsense"
    assert hub.log_with == [later]
