"""Libraries that cannot be imported, and what is said of devices."""

import os
from pathlib import Path

import pytest

from accel_verify.diagnosis.libraries import Probe, _devices

SOURCES = {
    "whole": "print('a library that talks')",
    "broken": "raise ImportError('libcuda.so.1: cannot open shared object file\\nmore')",
    "crashing": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "slow": "import time\ntime.sleep(600)",
}


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what becomes of libraries that are installed in a folder of the path, in a real process."""
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def findings(*names: str, seconds: float = 60) -> list[tuple[str, str]]:
        return [(finding.state, finding.what) for finding in Probe(list(names)).findings(seconds)]

    return findings


def test_a_broken_library_is_named_with_its_error(probe) -> None:
    """What cannot be imported is a warning with the first line of the error; the libraries beside it are tried."""
    assert probe("broken", "whole") == [
        ("ok", "whole can be imported"),
        ("warning", "broken cannot be imported; got ImportError: libcuda.so.1: cannot open shared object file"),
    ]


@pytest.mark.parametrize(
    ("name", "seconds", "message"),
    [("crashing", 60, "ended with status -9"), ("slow", 2, "no result within 2 s")],
)
def test_a_library_that_takes_python_down_is_named(probe, name: str, seconds: float, message: str) -> None:
    """The library that was begun last is the culprit, and those behind it are said to be untried."""
    culprit, left = probe(name, "whole", seconds=seconds)
    assert culprit[0] == "warning"
    assert culprit[1].startswith(f"{name} cannot be imported; got ")
    assert message in culprit[1]
    assert left == ("warning", "whole not tried after that")


def test_devices_are_judged_by_what_was_seen() -> None:
    """A device that computes is ok, one whose memory is taken a warning, and one that fails a problem."""
    full = {"name": "cuda:1", "error": "", "model": "H200", "free": 2**30, "total": 2**37}
    seen = [{"name": "cuda:0", "error": "", "model": "H200", "free": 2**37, "total": 2**37}, full]
    failing = {"name": "cuda:2", "error": "CUDA error: out of memory"}
    found = _devices({"version": "2.13", "built": "13.0", "trouble": "", "devices": [*seen, failing]})
    assert [finding.state for finding in found] == ["ok", "ok", "warning", "problem"]
    assert found[1].what == "cuda:0, H200 computes; 128.0 of 128.0 GiB are free"
    assert found[3].what == "cuda:2 does not compute; got CUDA error: out of memory"
