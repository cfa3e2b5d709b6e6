"""Tests of finding trackers by name."""

import pytest

from accel_core.errors import ConfigurationError, MissingDependencyError, TrackerInterfaceError
from accel_core.options.enums import LoggerType
from accel_core.tracking import discovery
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker, on_main_process


class Mine(GeneralTracker):
    """A third party's tracker."""

    name = "mine"
    requires_logging_directory = False
    tracker = None


class Lacking(Mine):
    """Needs a library that nobody has."""

    name = "lacking"
    libraries = ("no_such_library_of_trackers",)


class Writing(Mine):
    """Writes to a folder."""

    name = "writing"
    requires_logging_directory = True


@pytest.fixture(autouse=True)
def _registered():
    for kind in (Mine, Lacking, Writing):
        discovery.register_tracker_class(kind)
    yield
    for kind in (Mine, Lacking, Writing):
        del discovery.LOGGER_TYPE_TO_CLASS[kind.name]


def test_known_by_name():
    """A registered class is found by its name, and is available when its library is."""
    assert discovery.LOGGER_TYPE_TO_CLASS["mine"] is Mine
    assert discovery.is_available("mine")
    assert not discovery.is_available("lacking")
    assert "mine" in discovery.get_available_trackers()
    assert "lacking" not in discovery.get_available_trackers()


def test_filter_takes_names_types_objects_and_lists():
    """Whatever is asked for comes back once, in order."""
    tracker = Mine()
    assert discovery.filter_trackers(None) == []
    assert discovery.filter_trackers("mine") == ["mine"]
    assert discovery.filter_trackers(tracker) == [tracker]
    assert discovery.filter_trackers([tracker, "mine", tracker, "mine"]) == [tracker, "mine"]


@pytest.mark.parametrize("everything", ["all", LoggerType.ALL, ["mine", "all"]])
def test_all(everything):
    """All means those that work here: with their library, and with a folder where they need one."""
    without = discovery.filter_trackers(everything)
    assert "mine" in without
    assert "lacking" not in without
    assert "writing" not in without
    assert "writing" in discovery.filter_trackers(everything, "logs")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mein", "Did you mean 'mine'"),
        (3, "known are"),
        ("zzzzzz", "register_tracker_class"),
        (None, "known are"),
        ("writing", "logging_dir is None"),
    ],
)
def test_unknown_name(name, message):
    """An unknown name is an error with the closest one, or all, and so is one that needs a folder without it."""
    with pytest.raises(ConfigurationError, match=message):
        discovery.filter_trackers([name])
    assert discovery.filter_trackers("writing", "logs") == ["writing"]


def test_a_missing_library_is_refused_or_skipped(caplog):
    """The error says what to install; with `warn`, a run does without the tracker: one warning, however often asked."""
    with pytest.raises(MissingDependencyError, match="pip install no_such_library_of_trackers"):
        discovery.filter_trackers("lacking")
    TrackerKwargs.missing_library = "warn"
    assert discovery.filter_trackers(["lacking", "mine"]) == ["mine"]
    assert discovery.filter_trackers("lacking") == []
    assert caplog.text.count("The run continues without this tracker. Install it: pip install no_such") == 1


def test_incomplete_class():
    """A class that lacks what every tracker has cannot be made."""
    with pytest.raises(TrackerInterfaceError, match="name, requires_logging_directory, tracker") as info:
        type("Bare", (GeneralTracker,), {})()
    assert isinstance(info.value, NotImplementedError)
    GeneralTracker(_blank=True)


@pytest.mark.parametrize(("rank", "main_only", "runs"), [("0", True, True), ("1", True, False), ("1", False, True)])
@pytest.mark.usefixtures("fresh_state")
def test_on_main_process(monkeypatch, rank, main_only, runs):
    """A marked method runs on rank 0, and everywhere for trackers of every rank."""
    monkeypatch.setenv("RANK", rank)

    class Ranked(Mine):
        """Tells that it ran."""

        main_process_only = main_only

        @on_main_process
        def go(self):
            """Return True."""
            return True

    assert (Ranked().go() is True) == runs
