"""What a person is shown of a traceback, and the line that names the cure."""

import traceback
from pathlib import Path

import pytest

from accel_launch.supervision.explanation import cure_of, fold, left_early
from accel_launch.supervision.outcome import ExitOutcome

CODE = "import json\ndef main():\n    json.loads('{')\nmain()\n"


def raised(folder: Path, code: str = CODE, mark: str = "") -> str:
    """Return the traceback of a script in a folder."""
    file = folder / "train.py"
    file.write_text(code)
    try:
        exec(compile(code, str(file), "exec"), {"__name__": "__main__"})
    except Exception as error:
        lines = traceback.format_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        return "\n".join(mark + line for line in "".join(lines).splitlines())
    raise AssertionError("the script raises")


@pytest.mark.parametrize("mark", ["", "[rank1]: "])
def test_frames_outside_the_folder_become_one_line(tmp_path: Path, mark: str) -> None:
    """The script's own frames, the error and the lines' marks stay; frames of libraries are counted."""
    whole = raised(tmp_path, mark=mark).splitlines()
    folded = fold("\n".join(whole), str(tmp_path)).splitlines()
    count = sum("json/" in line for line in whole)
    own = next(place for place, line in enumerate(whole) if "json/" in line)
    assert count > 1
    assert folded == [*whole[:own], f"{mark}  … {count} frames in json", whole[-1]]


def test_own_frames_after_a_library_stay(tmp_path: Path) -> None:
    """A function of the script that a library calls is shown, with one line for the frames on each side."""
    code = "import json\ndef read(found):\n    raise KeyError(1)\njson.loads('{}', object_hook=read)\n"
    folded = fold(raised(tmp_path, code), str(tmp_path))
    assert [line.split(" in ")[-1] for line in folded.splitlines() if "File" in line or "…" in line] == [
        "<module>", "json", "read",
    ]  # fmt: skip


def test_traceback_without_own_frames_is_whole(tmp_path: Path) -> None:
    """Where no frame is in the folder, or it is one of installed packages, nothing would be left."""
    whole = raised(tmp_path)
    assert fold(whole, str(tmp_path / "elsewhere")) == whole
    packages = tmp_path / "site-packages" / "train"
    packages.mkdir(parents=True)
    assert fold(raised(packages), str(tmp_path)) == raised(packages)


LOST = "Connection closed by peer [127.0.0.1]:1. This is typically caused by a remote worker crashing. GLHF!"


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (0, LOST, "Rank 0 ended (exit 0) while rank 1 was in lose at train.py:4; did it leave the loop early?"),
        (1, LOST, ""),
        (0, "wrong", ""),
    ],
)
def test_rank_that_left_early_is_named(tmp_path: Path, status: int, error: str, expected: str) -> None:
    """A rank that ended well is named where another lost its connection, and not where that one raised by itself."""
    (tmp_path / "script").mkdir()
    library = f"def lose(): raise RuntimeError({error!r})"
    code = f"lib = {{}}\nexec(compile({library!r}, '/lib/site-packages/lost.py', 'exec'), lib)\n\nlib['lose']()\n"
    told = raised(tmp_path / "script", code)
    first = ExitOutcome(0, 0, 1, status, stopped=False, failed_at=0.0)
    second = ExitOutcome(1, 1, 2, 1, stopped=False, failed_at=-1.0, traceback=told)
    assert left_early([first, second], str(tmp_path / "script")) == expected


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        ("'DistributedDataParallel' object has no attribute 'generate'", "`accelerator.unwrap_model(model).generate`"),
        ("Expected to have finished reduction in the prior iteration before", "find_unused_parameters=True"),
        ("'Linear' object has no attribute 'generate'", ""),
    ],
)
def test_cure_of_a_known_error_is_named(error: str, cure: str) -> None:
    """Errors of torch that are often met come with what mends them."""
    assert cure in cure_of(f"AttributeError: {error}")
    assert bool(cure) == bool(cure_of(error))
