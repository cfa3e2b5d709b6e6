"""The kit for a GPU, tried on the simulated accelerator: every row runs, none is lost, and no figure is kept."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_testing import limits, requires

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = requires("program:g++", "program:ninja")  # which build the simulated device
KIT = pytest.mark.full("a benchmark")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Try all rows, with nothing of this environment's path but what the kit finds itself."""
    file = tmp_path_factory.mktemp("kit") / "found.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry-run", "--json", str(file)]
    done = limits.run(command, quiet=30, check=True)
    result: dict[str, Any] = json.loads(file.read_text())
    assert done.stdout.strip() == result["table"]
    return result


@KIT
def test_every_row_is_in_the_table(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows ran or say which library is missing, and each of their lines is in the table once."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = importlib.import_module("gpu").rows()
    assert [result["row"] for result in found["rows"]] == list(known)
    for result in found["rows"]:
        ours = result["accel"]
        assert "figures" in ours or "is not installed" in ours["not measured"], (result["row"], ours)
    lines = found["table"].splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [
        line.words for row in known.values() for line in row.lines
    ]


@KIT
def test_a_dry_run_shows_no_figure(found: dict[str, Any], tmp_path: Path) -> None:
    """The table says what it is and holds no number that was taken, and it is not let into the results."""
    title, _, *lines = found["table"].splitlines()
    assert found["dry_run"]
    assert "DRY RUN" in title
    for line in lines:
        limit, ours = (cell.strip() for cell in line.split("|")[2:4])
        assert limit in ("", "ran"), line
        assert ours.startswith(("ran", "yes", "not measured")), line
    file, results = tmp_path / "found.json", BENCHMARKS / "RESULTS.md"
    file.write_text(json.dumps(found))
    before = results.read_bytes()
    command = [sys.executable, str(BENCHMARKS / "record.py"), "gpu", "--taken", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Only what was measured goes into RESULTS.md; got a dry run" in done.stderr
    assert results.read_bytes() == before


def test_a_row_that_ends_its_process_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows that hang, raise or kill their process say so, and the next one is measured."""
    program = tmp_path / "try.py"
    program.write_text(
        "import json, os, sys, time\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import gpu\n"
        "from pathlib import Path\n"
        "from gpu_rows.place import Row\n"
        "def hangs(place): time.sleep(3600)\n"
        "def dies(place): os._exit(3)\n"
        "def raises(place): raise ValueError('a | in words')\n"
        "def runs(place): return {'passed': 'yes'}\n"
        "made = {each.__name__: Row(each, (), dry='cpu') for each in (hangs, dies, raises, runs)}\n"
        "gpu.rows = lambda: made\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "print(json.dumps([gpu.one(name, 'accel', True, folder / name, 3) for name in made]))\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = limits.run([sys.executable, str(program)], env=environment, check=True, quiet=12)
    hung, dead, raised, ran = json.loads(done.stdout.splitlines()[-1])
    assert hung == {"failed": "not done after 3 s"}
    assert dead == {"failed": "its process ended with status 3"}
    assert raised == {"failed": "ValueError: a | in words"}
    assert ran["figures"] == {"passed": "yes"}
