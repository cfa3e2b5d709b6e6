"""What adding one of each thing touches, and that it then works through every door.

Each is added to a copy of the tree by the edits of `additions.py`. (An option: in the tests of accel-launch.)
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import additions
from additions import Addition

from accel_testing import limits

LIMITS = {
    "a device": (additions.DEVICE, 2),
    "a precision": (additions.PRECISION, 3),
    "a strategy": (additions.STRATEGY, 4),
    "an engine": (additions.ENGINE, 0),
    "a tracker": (additions.TRACKER, 4),
}


def run(folder: Path, addition: Addition, source: str, *, pytest_on: str = "") -> str:
    """Run a program on a copy of the tree with an addition in it, and return what it printed."""
    tree = additions.copy_of_the_tree(folder)
    addition.apply(tree)
    paths = [str(additions.entry_points(tree)), *map(str, (tree / "packages").glob("*/src"))]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    (tree / "program.py").write_text(source)
    pytest_of = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if pytest_on else []
    words = [*pytest_of, "program.py", *shlex.split(pytest_on)]
    return limits.run([sys.executable, *words], cwd=tree, env=environment, quiet=40, check=True).stdout


@pytest.mark.parametrize("what", LIMITS)
def test_an_addition_touches_few_files(what: str) -> None:
    """The edits touch no more files than CONTRIBUTING.md says."""
    addition, limit = LIMITS[what]
    assert addition.files_outside(additions.OWN_PACKAGE) <= limit
    rows = (additions.ROOT / "CONTRIBUTING.md").read_text()
    row = re.search(rf"^\| {what} \|.*\| (\d) \|$", rows, re.MULTILINE)
    assert row is not None, what
    assert int(row[1]) == limit


def test_a_device(tmp_path: Path) -> None:
    """A row and a label make a device: chosen, labeled, conforming, known to the launcher and to every table."""
    run(
        tmp_path,
        additions.DEVICE,
        """
import torch
from accel_core.devices import registry
from accel_core.options.enums import DistributedType
from accel_core.options.hardware import HARDWARE
from accel_core.precision.scaler import get_grad_scaler
from accel_testing.conformance.device import DeviceConformance

class TestAbacus(DeviceConformance):
    device = registry.named("meta")

def test_doors():
    assert registry.ORDER[0] == "meta"
    assert registry.named("meta").label is DistributedType.MULTI_ABACUS
    assert [row.visible_variable for row in HARDWARE if row.name == "meta"] == ["ABACUS_VISIBLE_DEVICES"]
""",
        pytest_on="-W ignore",
    )


def test_a_precision(tmp_path: Path) -> None:
    """A member and a row make a precision: trained in, and offered by the launcher and by commands."""
    told = """
import argparse
import torch
from accel_core.accelerator import Accelerator
from accel_launch.settings.config import basic_config
from accel_launch.settings.table import BY_KEY
from accel_verify.parallel.command import COMMAND

accelerator = Accelerator(cpu=True, mixed_precision="abacus")
model = accelerator.prepare(torch.nn.Linear(4, 4))
accelerator.backward(model(torch.rand(2, 4)).sum())
strategy = accelerator._runtime.strategy
print(strategy.number_format.converted, model(torch.rand(2, 4)).dtype, basic_config("abacus").mixed_precision)
print("abacus" in BY_KEY["mixed_precision"].choices)
parser = argparse.ArgumentParser()
COMMAND.add_arguments(parser)
print("abacus" in parser.format_help())
"""
    assert run(tmp_path, additions.PRECISION, told).split() == ["1", "torch.float32", "abacus", "True", "True"]


def test_a_strategy(tmp_path: Path) -> None:
    """It is chosen by its plugin and by its variable, gets its plugin with the option's value, and conforms."""
    run(
        tmp_path,
        additions.STRATEGY,
        """
import pytest
from accel_core.accelerator import Accelerator
from accel_core.plugins.echo import EchoPlugin
from accel_core.state import reset_all
from accel_core.strategies.echo import EchoStrategy
from accel_testing.conformance.strategy import StrategyConformance

@pytest.mark.parametrize(("handlers", "variables", "loudness"), [
    ([EchoPlugin(loudness=5)], {}, 5),
    (None, {"ACCELERATE_USE_ECHO": "true", "ECHO_LOUDNESS": "7"}, 7),
])
def test_chosen(handlers, variables, loudness, monkeypatch):
    reset_all()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = Accelerator(cpu=True, kwargs_handlers=handlers)._runtime.strategy
    assert type(strategy) is EchoStrategy
    assert strategy.parts.plugin.loudness == loudness
    reset_all()

class TestEcho(StrategyConformance):
    strategy = EchoStrategy
    sizes = (2,)

    def arguments(self):
        return {"kwargs_handlers": [EchoPlugin()]}
""",
        pytest_on="-W ignore -k 'equals_one_process or chosen'",
    )


def test_an_engine(tmp_path: Path) -> None:
    """Its package alone makes it chosen, configured, launched, checked, asked about and known in checkpoints."""
    printed = run(
        tmp_path,
        additions.ENGINE,
        """
import os
from accel_core.accelerator import Accelerator
from accel_core.checkpoint.names import engine_of
from accel_core.state import reset_all
from accel_chorus.plugin import ChorusPlugin
def tell(handlers):
    strategy = Accelerator(cpu=True, kwargs_handlers=handlers)._runtime.strategy
    print(type(strategy).__name__, strategy.parts.plugin.voices, engine_of("pytorch_model_chorus/voice_1.pt"))
    reset_all()
tell([ChorusPlugin(voices=5)])
chosen = {"ACCELERATE_USE_CHORUS": "true", "CHORUS_VOICES": "7"}
os.environ.update(chosen)
tell(None)
for name in chosen:
    del os.environ[name]
from accel_launch import cli
from accel_launch.questions.cluster import CLUSTER
words = ["launch", "--cpu", "--use-chorus", "--chorus-voices"]
assert cli.main([*words, "3", "--dry-run", "program.py"]) == 0
assert cli.main([*words, "3", "--explain", "program.py"]) == 0
assert cli.main([*words, "9", "program.py"]) == 2
print([question.key for question in CLUSTER if "chorus" in question.key])
""",
    )
    assert printed.splitlines()[:2] == ["ChorusStrategy 5 Chorus", "ChorusStrategy 7 Chorus"]
    for part in ("ACCELERATE_USE_CHORUS=true", "CHORUS_VOICES=3", "CHORUS_HALL=large", "* chorus    Chorus: torch "):
        assert part in printed, part
    assert printed.strip().endswith("['chorus_voices']")


def test_a_tracker(tmp_path: Path) -> None:
    """It is found by its word, listed as available, importable by its class, and a run logs through it."""
    printed = run(
        tmp_path,
        additions.TRACKER,
        """
from accel_core.accelerator import Accelerator
from accel_core.tracking.discovery import get_available_trackers
from accel_trackers import LinesTracker
accelerator = Accelerator(cpu=True, log_with="lines", project_dir="runs")
accelerator.init_trackers("first", config={"rate": 0.5})
accelerator.log({"loss": 2.0}, step=1)
accelerator.end_training()
print("lines" in map(str, get_available_trackers()), type(accelerator.get_tracker("lines", unwrap=False)).__name__)
print(open("runs/first.jsonl").read())
""",
    )
    assert '{"rate": 0.5}' in printed
    assert '{"step": 1, "loss": 2.0}' in printed
    assert printed.startswith("True")
