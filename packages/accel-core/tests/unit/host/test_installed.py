"""Distributions and their entry points, as `importlib.metadata` finds them."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

from accel_core.host.installed import distributions, points_of


def install(folder: Path, name: str, version: str, points: str) -> None:
    """Lay down what pip leaves of a distribution."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (place / "entry_points.txt").write_text(points)


def both(group: str) -> dict[str, str]:
    """Return the entry points of a group, which are those of Python's library."""
    found = points_of(group)
    importlib.invalidate_caches()
    points = list(importlib.metadata.entry_points(group=group))
    assert found == {point.name: point.value.partition("[")[0].strip() for point in reversed(points)}
    return found


def test_entry_points_are_those_of_folders_and_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two distributions of one name the first on the path counts; what is installed later is found too."""
    first, second, archive = tmp_path / "first", tmp_path / "second", tmp_path / "third.zip"
    install(
        first,
        "Some_Name",
        "1.0",
        "[console_scripts]\nx = y:z\n\n[accel.tests]\n# none\nb = one:two\na=three:four.five\n",
    )
    install(second, "some_name", "2.0", "[accel.tests]\nc = not:this\n")
    install(second, "other", "1", "[accel.tests]\nd = six:seven")
    install(tmp_path / "packed", "zipped", "1", "[accel.tests]\ne = eight:nine\n")
    with zipfile.ZipFile(archive, "w") as file:
        for each in (tmp_path / "packed").rglob("*"):
            if each.is_file():
                file.write(each, each.relative_to(tmp_path / "packed"))
    monkeypatch.setattr(sys, "path", [str(first), str(second), str(archive), str(tmp_path / "absent"), *sys.path])
    expected = {"a": "three:four.five", "b": "one:two", "d": "six:seven", "e": "eight:nine"}
    assert both("accel.tests") == expected
    assert {"some-name", "other", "zipped", "torch"} <= set(distributions())
    install(second, "new", "1", "[accel.tests]\nf = ten:eleven\n")
    assert both("accel.tests") == expected | {"f": "ten:eleven"}


def test_a_current_folder_that_was_deleted_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed elsewhere is found all the same, and extras are no part of a name."""
    install(tmp_path / "one", "some", "1", "[accel.tests]\na = b:c [extra]\n")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "one"), *filter(None, sys.path)])
    assert points_of("accel.tests") == {"a": "b:c"}


@pytest.mark.parametrize("group", ["accel.engines", "accel.trackers", "accel.devices", "console_scripts", "pytest11"])
def test_what_is_installed_here_is_found(group: str) -> None:
    """The groups of accel, and large ones of others."""
    both(group)
