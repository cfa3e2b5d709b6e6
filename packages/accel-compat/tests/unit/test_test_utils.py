"""What test suites of other libraries import from `accelerate.test_utils`."""

import inspect
import os
import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import accelerate
from accel_core.errors import ConfigurationError
from accel_testing import world
from accelerate import test_utils
from accelerate._test_processes import RunOutput
from accelerate.test_utils import testing, training

MARKERS = sorted(name for name in dir(testing) if name.startswith("require_"))
HERE_WITHOUT_ACCELERATOR = {
    *("require_cpu", "require_non_xpu", "require_non_hpu", "require_non_torch_xla", "require_fp16", "require_fsdp2"),
    "require_pippy",
}
"""Markers that let a test run on every machine without an accelerator, whatever is installed."""
ON_ACCELERATORS = {
    name
    for name in MARKERS
    if any(word in name for word in ("cuda", "gpu", "device", "_xpu", "mlu", "musa", "npu", "sdaa", "neuron", "tpu"))
} - {"require_non_xpu"}


def test_the_backend_is_that_of_this_machine() -> None:
    """Name, number and memory are those of one device, or of several."""
    name, count, taken = testing.get_backend()
    assert (name, count) == (testing.torch_device, test_utils.device_count)
    assert torch.empty(1, device=name).device.type == name
    assert taken() >= 0
    assert test_utils.DEFAULT_LAUNCH_COMMAND[-2:] == [f"--num_processes={count}", "--monitor_interval=0.1"]


def test_every_marker_of_the_original_is_here() -> None:
    """All 56 of them are, each takes a test, and says what is missing where it skips."""
    assert len(MARKERS) == 56
    for name in MARKERS:
        if name != "require_torch_min_version":
            marked = getattr(testing, name)(lambda: None)
            why = getattr(marked, "__unittest_skip_why__", "")
            assert why.startswith("test requires ") or not getattr(marked, "__unittest_skip__", False), name


@pytest.mark.skipif(testing.torch_device != "cpu", reason="needs a machine without an accelerator")
def test_markers_know_a_machine_without_accelerator() -> None:
    """Tests for accelerators are skipped there, tests for the CPU run, as classes and as functions."""

    class Cases(unittest.TestCase):
        pass

    for name in HERE_WITHOUT_ACCELERATOR:
        assert not getattr(getattr(testing, name)(lambda: None), "__unittest_skip__", False), name
    for name in ON_ACCELERATORS:
        assert getattr(testing, name)(lambda: None).__unittest_skip__, name
    assert testing.require_cuda(Cases).__unittest_skip__


def test_markers_for_versions_and_slow_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version skips where torch is older, one is needed; slow tests run where RUN_SLOW says so."""
    assert testing.require_torch_min_version(lambda: None, version="99").__unittest_skip__
    assert not hasattr(testing.require_torch_min_version(version="2.0")(lambda: None), "__unittest_skip__")
    with pytest.raises(ConfigurationError, match="got version=None"):
        testing.require_torch_min_version(lambda: None)
    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert testing.slow(lambda: None).__unittest_skip__
    monkeypatch.setenv("RUN_SLOW", "yes")
    assert not hasattr(testing.slow(lambda: None), "__unittest_skip__")
    assert testing.skip(lambda: None).__unittest_skip__


def test_words_of_a_launch() -> None:
    """True is an option without a value, None is none, all else has one."""
    words = testing.get_launch_command(multi_gpu=True, debug=None, mixed_precision="bf16", zero=False)
    assert words == ["accelerate", "launch", "--multi_gpu", "--mixed_precision=bf16", "--zero=False"]


def test_a_command_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output comes back, its environment is the one given, and another status than 0 is an error with all of it."""
    told = "import os, sys; print(os.environ.get('ACCEL_TOLD')); sys.stderr.write('bad'); sys.exit(int(sys.argv[1]))"
    command = [sys.executable, "-c", told]
    environment = {**os.environ, "ACCEL_TOLD": "here"}
    assert testing.run_command([*command, "0"], return_stdout=True, env=environment) == "here\nbad"
    assert testing.run_command([*command, "0"]) is None
    with pytest.raises(testing.SubprocessCallException, match=r"got 3 from [\s\S]*None\nbad"):
        testing.run_command([*command, "3"])


def test_a_program_is_watched(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines are shown as they come, and returned; another status than 0 is an error with what went wrong."""
    command = [
        sys.executable,
        "-c",
        "import sys; print('one\\ntwo'); sys.stderr.write('e\\n'); sys.exit(len(sys.argv) - 1)",
    ]
    done = testing.execute_subprocess_async(command)
    assert done == RunOutput(0, ["one", "two"], ["e"])
    shown = capsys.readouterr()
    assert shown.out.startswith("\nRunning:  ")
    assert shown.out.endswith("stdout: one\nstdout: two\n")
    assert shown.err == "stderr: e\n"
    assert testing.execute_subprocess_async(command, quiet=True, echo=False).stdout == ["one", "two"]
    assert capsys.readouterr() == ("", "")
    with pytest.raises(RuntimeError, match=r"got 1 from '.*errors:\ne$"):
        testing.execute_subprocess_async([*command, Path("more")], quiet=True)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (lambda: None, "got no exception"),
        (lambda: {}["k"], "got <class 'KeyError'>"),
        (lambda: int("x"), "has 'two' in it; got"),
    ],
)
def test_other_errors_than_the_wanted_one_are_told(block: Callable[[], object], told: str) -> None:
    """None at all, another one, and one with other words are assertions that fail."""
    with pytest.raises(AssertionError, match=told), test_utils.assert_exception(ValueError, "two"):
        block()


def test_an_error_and_output_are_caught() -> None:
    """The error that is wanted ends there; what a function prints is returned."""
    with test_utils.assert_exception(ValueError, "invalid"):
        int("x")
    assert test_utils.capture_call_output(print, "a", end="!") == "a!"


def test_workers_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a worker of pytest-xdist is added to the usual port."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert (test_utils.pytest_xdist_worker_id(), test_utils.get_torch_dist_unique_port()) == (3, 29503)
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert test_utils.get_torch_dist_unique_port() == 29500


def test_cases_clean_up() -> None:
    """The folder is empty for each test and gone after the last; states and patches end with their test."""
    seen = []

    class Folder(testing.TempDirTestCase):
        def test_one(self) -> None:
            seen.append([path.name for path in self.tmpdir.iterdir()])
            (self.tmpdir / "folder").mkdir()
            (self.tmpdir / "folder" / "file").write_text("")
            (self.tmpdir / "file").write_text("")

        test_two = test_one

    class States(testing.AccelerateTestCase, testing.MockingTestCase):
        def test_state(self) -> None:
            self.add_mocks(mock.patch.dict(os.environ, ACCEL_PATCHED="1"))
            self.add_mocks([mock.patch.object(Folder, "clear_on_setup", False)])
            accelerate.PartialState(cpu=True)
            seen.append([os.environ["ACCEL_PATCHED"], str(Folder.clear_on_setup)])

    result = unittest.TestResult()
    for kind in (Folder, States):
        unittest.defaultTestLoader.loadTestsFromTestCase(kind)(result)
    assert result.errors == result.failures == []
    assert seen == [[], [], ["1", "False"]]
    assert not Folder.tmpdir.exists()
    assert accelerate.PartialState._shared_state == {}
    assert "ACCEL_PATCHED" not in os.environ
    assert Folder.clear_on_setup


def test_the_line_is_learned_from_the_points_of_the_original() -> None:
    """Points of a seed are those that Accelerate draws, and the model has their form."""
    points = training.RegressionDataset(length=4, seed=42)
    assert len(points) == 4
    torch.testing.assert_close(torch.tensor(points.x), torch.tensor([0.3047171, -1.0399841, 0.7504512, 0.9405647]))
    torch.testing.assert_close(torch.tensor(points.y), torch.tensor([3.4143305, 0.7898138, 4.513686, 4.849505]))
    assert points[1] == {"x": points.x[1], "y": points.y[1]}
    model = test_utils.RegressionModel(a=2, b=3)
    assert test_utils.capture_call_output(model, torch.ones(1)).startswith("Model dtype: torch.float32")
    assert not model.first_batch
    assert model(torch.tensor(points.x)).requires_grad
    assert model(torch.ones(1)).item() == 5


@world(2)
def test_tensors_are_compared_over_ranks() -> None:
    """Equal tensors are the same on all ranks, others are not."""
    rank = accelerate.PartialState().process_index
    assert test_utils.are_the_same_tensors(torch.ones(2))
    assert not test_utils.are_the_same_tensors(torch.full((2,), float(rank)))


def test_the_script_that_is_launched_is_our_check() -> None:
    """Suites find it beside the package of the helpers, and it checks this process."""
    script = Path(inspect.getfile(test_utils)).parent / "scripts" / "test_script.py"
    assert script == test_utils.path_in_accelerate_package("test_utils", "scripts", "test_script.py")
    done = subprocess.run([sys.executable, str(script), "gather"], capture_output=True, text=True, check=True)
    assert "processes start and gather: holds for 1 process" in done.stdout
