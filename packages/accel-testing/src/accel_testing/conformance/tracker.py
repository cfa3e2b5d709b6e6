"""What every tracker has to do, as a class of tests to subclass.

    from accel_testing.conformance.tracker import Stored, TrackerConformance

    class TestMyTracker(TrackerConformance):
        tracker_class = MyTracker

        def read(self, folder, state):
            return Stored(scalars=..., config=...)

A session in a fresh process, started as a user's script is, makes the tracker, logs everything in `CONFIG`, `SCALARS`
and the others through a `TrackerHub`, resumes it, and reads back what was stored; each test then looks at one thing.
The library is real, and its process ends with it, so that what it leaves behind disturbs no other test.
"""

from __future__ import annotations

import dataclasses
import enum
import faulthandler
import inspect
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from accel_core.tracking.discovery import LOGGER_TYPE_TO_CLASS, register_tracker_class
from accel_core.tracking.handle import NULL_RUN, null_tracker
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.settings import TrackerKwargs
from accel_core.tracking.tracker import GeneralTracker
from accel_testing import limits
from accel_testing.requires import missing
from accel_testing.world import imported

_T = TypeVar("_T")


class Mode(enum.Enum):
    """An enumeration in the configuration."""

    FAST = "fast"


@dataclasses.dataclass
class Optim:
    """A dataclass in the configuration."""

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)


CONFIG: dict[str, Any] = {
    "lr": 0.1,
    "epochs": 3,
    "name": "small",
    "flag": True,
    "nothing": None,
    "sizes": [1, 2, {"deep": [3, None]}],
    "model": {"layers": 2, "path": Path("/data/x"), "dtype": torch.bfloat16, 7: "number key"},
    "optim": Optim(),
    "mode": Mode.FAST,
    "weights": torch.tensor([1.0, 2.0]),
    "odd name: [a/b]": "x",
    "empty": {},
}
"""The configuration that a session stores."""

LEAVES: list[bool | float | str] = [
    *(0.1, 3, "small", True, "None", 1, 2, 3, "None", 2, "/data/x", "torch.bfloat16", "number key"),
    *(0.1, 0.9, 0.999, "Mode.FAST", "[1.0, 2.0]", "x", "{}"),
]
"""What of `CONFIG` a library has to show: each leaf as a number or in the words of its owner."""

SCALARS: dict[str, list[tuple[int, float]]] = {
    "loss": [(step, 1.0 / (step + 3)) for step in range(5)],
    "eval_accuracy": [(0, 0.5), (4, 0.75)],
    "count": [(2, 7.0)],
}
"""The numbers that a session logs: by name, steps and values. The first of each is a tensor."""

RESUMED: list[tuple[int, float]] = [(5, 0.125), (6, 0.0625)]
"""What resumed sessions add to `loss`: one that is known before its trackers start, and one that is known later."""

TEXTS: dict[str, list[tuple[int, str]]] = {"note": [(1, "hello, wörld"), (3, "second")]}
"""The texts that a session logs."""

ODD: dict[str, Any] = {"none": None, "object": object(), "list": [1, None], "mode": Mode.FAST, "big": 10**30}
"""Values that no library expects."""

TABLE: tuple[list[str], list[list[Any]]] = (["name", "score"], [["a", 1], ["b", 2]])
"""The table that a session logs, at step 4, as `results`."""


def picture() -> Any:
    """Return the image that a session logs at step 4, as `picture`: an array of shape (6, 8, 3) of bytes."""
    values = torch.arange(6 * 8 * 3, dtype=torch.uint8).reshape(6, 8, 3)
    return values.numpy()


@dataclasses.dataclass
class Stored:
    """What a tracker stored, read back without it.

    Attributes:
        scalars: By name, steps and values in the order stored.
        texts: By name, steps and texts; `None` where the library keeps no texts with steps.
        config: The configuration's table, by path; values may be texts.
        images: By name, steps and pixels; `None` where it takes none.
        table: Columns and rows of `results`; `None` where it takes none.
        artifact: Content of the artifact; `None` where it takes none.
        runs: How many runs there are.
    """

    scalars: dict[str, list[tuple[int | None, float]]]
    config: dict[str, Any]
    texts: dict[str, list[tuple[int | None, str]]] | None = None
    images: dict[str, list[tuple[int | None, Any]]] | None = None
    table: tuple[list[str], list[list[Any]]] | None = None
    artifact: bytes | None = None
    runs: int = 1


class TrackerConformance:
    """The tests; subclass it with a name that pytest collects.

    Attributes:
        tracker_class: The class under test.
        environment: Variables for the session, such as a library's offline switch. `{folder}` is replaced.
        rounds: Dtype that the library rounds numbers to.
        lossy_images: Whether the library compresses pixels, so that only their shape comes back.
        resumes: Whether a run of the session can be continued here: offline runs of some libraries cannot.
        timeout: Seconds that a session takes at most on a quiet machine. It is ended after ten times as many.
    """

    tracker_class: ClassVar[Any] = None
    environment: ClassVar[Mapping[str, str]] = {}
    rounds: ClassVar[torch.dtype] = torch.float64
    lossy_images: ClassVar[bool] = False
    resumes: ClassVar[bool] = True
    timeout: ClassVar[float] = 12.0

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Return the keyword arguments of the tracker's constructor, with everything below `folder`."""
        return {}

    def images(self, name: str, pixels: object) -> dict[str, Any]:
        """Return what to pass to `log_images` for one picture of shape (H, W, C)."""
        return {name: [pixels]}

    def image_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `log_images`."""
        return {}

    def read(self, folder: Path, state: Mapping[str, Any]) -> Stored:
        """Read what the session stored, with the library's own reader or from its files."""
        raise TypeError(f"{type(self).__name__} has no way to read what was stored; got none. Define `read`.")

    @pytest.fixture(scope="class")
    @classmethod
    def session(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """Run the session once per class, in its own process."""
        for reason in map(missing, cls.tracker_class.libraries[:1]):
            if reason is not None:
                pytest.skip(reason)
        folder = tmp_path_factory.mktemp("session")
        variables = os.environ | {name: value.format(folder=folder) for name, value in cls.environment.items()}
        source = inspect.getsourcefile(cls)
        script = f"from {__name__} import _hold_session; _hold_session({source!r}, {cls.__qualname__!r})"
        output = folder.with_name(f"{folder.name}.printed")
        # Into a file: a pipe stays open as long as a service that the library leaves running.
        with open(output, "wb") as printed:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": printed}
            command = [sys.executable, "-c", script]
            done = limits.run(command, quiet=cls.timeout, cwd=folder, env=variables, **streams)
        assert done.returncode == 0, output.read_text(errors="replace")
        return pickle.loads((folder / "found.pickle").read_bytes())

    def test_numbers_are_exact_and_at_their_step(self, session: dict[str, Any]) -> None:
        """Every number is stored at its step, as exact as the library stores numbers."""
        stored: Stored = session["stored"]
        for name, expected in SCALARS.items():
            rounded = [(step, torch.tensor(value, dtype=self.rounds).item()) for step, value in expected]
            assert stored.scalars[name][: len(expected)] == rounded

    def test_texts(self, session: dict[str, Any]) -> None:
        """Every text is stored at its step."""
        texts = session["stored"].texts
        if texts is None:
            pytest.skip("the library keeps no texts with steps")
        assert texts["note"] == TEXTS["note"]

    def test_configuration(self, session: dict[str, Any]) -> None:
        """Every leaf of the configuration is shown."""
        stored: Stored = session["stored"]
        shown = {_shown(value) for value in stored.config.values()}
        assert [leaf for leaf in LEAVES if _shown(leaf) not in shown] == []

    def test_image(self, session: dict[str, Any]) -> None:
        """An image is stored at its step, pixel by pixel where the library does not compress it."""
        ((step, pixels),) = self._taken(session["stored"].images, "log_images")["picture"]
        assert step == 4
        assert pixels.shape == picture().shape
        assert self.lossy_images or (pixels == picture()).all()

    def test_table(self, session: dict[str, Any]) -> None:
        """A table is stored with its columns and rows."""
        assert self._taken(session["stored"].table, "log_table") == TABLE

    def test_artifact(self, session: dict[str, Any]) -> None:
        """A file is stored byte by byte, although its owner removed it at once."""
        assert self._taken(session["stored"].artifact, "log_artifact") == b"content"

    def _taken(self, found: _T | None, method: str) -> _T:
        """Return what was stored by a method that a tracker may lack; skip the test where it does."""
        if found is None:
            assert not hasattr(self.tracker_class, method), f"{method} is there; `read` has to give what it stored"
            pytest.skip(f"the tracker has no {method}")
        return found

    def test_nothing_failed(self, session: dict[str, Any]) -> None:
        """No call raised, not even for values that the library does not know, and the end may come twice."""
        assert session["failures"] == {}

    def test_resume(self, session: dict[str, Any]) -> None:
        """Whenever a run learns which one it resumes, it goes on with the same, its steps go on, and no other stays."""
        assert json.loads(json.dumps(session["state"])) == session["state"]
        if not self.resumes:
            pytest.skip("an offline run of the library cannot be continued")
        stored: Stored = session["stored"]
        rounded = [(step, torch.tensor(value, dtype=self.rounds).item()) for step, value in RESUMED]
        assert stored.scalars["loss"][-len(RESUMED) :] == rounded
        assert stored.runs == 1
        assert session["resumed_state"] == session["state"]

    def test_other_ranks(self) -> None:
        """Another rank's tracker is of the class, has its methods, and does nothing."""
        null = null_tracker(self.tracker_class)
        assert isinstance(null, self.tracker_class)
        assert null.name == self.tracker_class.name
        assert null.tracker is NULL_RUN
        for method in ("start", "finish"):
            assert getattr(null, method)() is None
        null.log({"loss": 1.0}, step=0)
        null.store_init_configuration({"a": 1})

    def test_constructor_keeps_its_arguments_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Making the tracker starts nothing: no file, no run."""
        monkeypatch.chdir(tmp_path)
        folder = (str(tmp_path),) if self.tracker_class.requires_logging_directory else ()
        made = self.tracker_class("project", *folder, **self.arguments(tmp_path))
        assert isinstance(made, GeneralTracker)
        assert list(tmp_path.iterdir()) == []


def _shown(value: object) -> float | str:
    """Read a number, a truth or a text as a library may show it."""
    word = str(value)
    try:
        return float({"true": 1, "false": 0}.get(word.lower(), word))
    except ValueError:
        return word


def _hold_session(source: str, qualname: str) -> None:
    """Log everything, resume, read back; the body of the session's process."""
    faulthandler.register(limits.STACKS)
    folder = Path.cwd()
    sys.path.insert(0, str(Path(source).parent))  # as pytest does, so that the suite finds its neighbors
    suite: TrackerConformance = imported(source, qualname)()
    name = suite.tracker_class.name
    if name not in LOGGER_TYPE_TO_CLASS:
        register_tracker_class(suite.tracker_class)
    seconds = limits.limit(suite.timeout)
    settings = TrackerKwargs(drain_seconds=seconds, start_seconds=seconds)
    hub = TrackerHub(name, folder, settings=settings)
    hub.init("project", CONFIG, {name: suite.arguments(folder)})
    _log_everything(hub, suite, folder)
    hub.finish()
    found: dict[str, Any] = {"state": hub.tracker_states[name], "failures": hub.failures}
    whole = json.loads(json.dumps({**hub.state_dict(), "trackers": hub.tracker_states}))
    for known_first, (step, value) in zip((True, False), RESUMED if suite.resumes else (), strict=False):
        again = TrackerHub(name, folder, settings=settings)
        if known_first:
            again.load_state_dict(whole)
        again.init("project", CONFIG, {name: suite.arguments(folder)})
        if not known_first:
            again.load_state_dict(whole)
        again.log({"loss": value}, step=step)
        again.finish()
        whole["steps"] = again.state_dict()["steps"]
        found["resumed_state"] = again.tracker_states[name]
        found["failures"] |= again.failures
    found["stored"] = suite.read(folder, found["state"])
    (folder / "found.pickle").write_bytes(pickle.dumps(found))


def _log_everything(hub: TrackerHub, suite: TrackerConformance, folder: Path) -> None:
    tracker = hub.get(hub.trackers[0].name)
    logged: dict[str, list[tuple[int, Any]]] = {**SCALARS, **TEXTS}
    for step in range(5):
        row = {name: dict(series)[step] for name, series in logged.items() if step in dict(series)}
        if step == 0:
            row = {name: torch.tensor(value, dtype=torch.float64) for name, value in row.items()}
        hub.log(row, step=step)
    hub.log(ODD, step=4)
    if hasattr(suite.tracker_class, "log_images"):
        tracker.log_images(suite.images("picture", picture()), step=4, **suite.image_arguments())
    if hasattr(suite.tracker_class, "log_table"):
        tracker.log_table("results", columns=TABLE[0], data=TABLE[1], step=4)
    if hasattr(suite.tracker_class, "log_artifact"):
        file = folder / "artifact.bin"
        file.write_bytes(b"content")
        tracker.log_artifact(str(file))
        file.unlink()
