"""Disks, shared memory and open files, in the conditions that go wrong."""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from accel_verify.diagnosis.machine import check_disks, check_shared_memory


@pytest.fixture(autouse=True)
def forget_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python look for the folder for temporary files anew."""
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_folders_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder is ok or low in space, a folder that is yet to be made counts as the one above it; nothing stays."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    found = check_disks(tmp_path / "runs" / "new")
    names = [finding.what.partition(":")[0] for finding in found]
    assert names == ["checkpoints", "temporary files", "cache"]
    assert {finding.state for finding in found} <= {"ok", "warning"}
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that takes no file is a problem."""
    monkeypatch.setenv("HF_HOME", "/proc/home")
    checkpoints, _, cache = check_disks(Path("/proc/runs"))
    assert checkpoints.state == cache.state == "problem"
    assert checkpoints.what.startswith("checkpoints: /proc/runs cannot be written; got ")


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    """A missing mount is a problem with its remedy."""
    [found] = check_shared_memory(tmp_path / "shm")
    assert (found.state, "--shm-size" in found.remedy) == ("problem", True)
    assert found.what.endswith("cannot be written; got No such file or directory")


def test_few_open_files() -> None:
    """A low limit is a warning with its remedy."""
    code = "from accel_verify.diagnosis.machine import check_open_files\nprint(check_open_files()[0])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "state='warning', what='a process may open 256 files'" in done.stdout
    assert "Run `ulimit -n 65536`" in done.stdout
