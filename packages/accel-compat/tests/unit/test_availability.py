"""What is installed and what the hardware can do, as Accelerate asks it."""

import importlib.metadata
import importlib.util

import pytest
import torch

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host.environ import patch_environment
from accelerate import _availability as availability

QUESTIONS = [name for name in availability.__all__ if name.startswith("is_")]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_has_a_plain_answer(name):
    """Each question answers yes or no, never None or an object, on any machine."""
    assert getattr(availability, name)() in (True, False)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("is_tensorboard_available", "tensorboard"),
        ("is_wandb_available", "wandb"),
        ("is_tqdm_available", "tqdm"),
        ("is_pytest_available", "pytest"),
    ],
)
def test_answers_follow_what_is_installed(name, module):
    """A library is available exactly if it can be found."""
    assert getattr(availability, name)() == (importlib.util.find_spec(module) is not None)


def test_lowest_versions_count():
    """A version that is too old is not available."""
    installed = importlib.metadata.version("torch")
    assert availability.is_weights_only_available()
    assert availability.is_pippy_available()
    assert installed.split(".")[0] == "2"
    assert not availability.is_numpy_available(min_version="999")
    assert not availability.is_mps_available(min_version="999")


def test_this_machine():
    """Without a GPU the CPU computes in both half precisions."""
    assert availability.is_bf16_available() or torch.cuda.is_available()
    assert availability.is_fp16_available()
    assert availability.is_torch_distributed_available()


def test_rich_has_to_be_asked_for():
    """Rich is used only where ACCELERATE_ENABLE_RICH asks for it."""
    with patch_environment(ACCELERATE_ENABLE_RICH="0"):
        assert not availability.is_rich_available()
    with patch_environment(ACCELERATE_ENABLE_RICH="1"):
        assert availability.is_rich_available() == (importlib.util.find_spec("rich") is not None)


def test_one_xla_device_is_not_two():
    """Asking for a TPU and a GPU at once is refused."""
    with pytest.raises(ConfigurationError, match="TPU and a GPU"):
        availability.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_guards_name_the_function_and_the_remedy(monkeypatch):
    """A guarded function says what it needs and how to get it, and keeps its name."""

    @availability.torchao_required
    def convert():
        return 1

    monkeypatch.setattr(availability, "is_torchao_available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"`convert` needs torchao 0\.6\.1.*pip install torchao"):
        convert()
    monkeypatch.setattr(availability, "is_torchao_available", lambda: True)
    assert convert() == 1
    assert convert.__name__ == "convert"


def test_deepspeed_guard():
    """A function for DeepSpeed runs only where DeepSpeed is the engine."""

    @availability.deepspeed_required
    def active():
        return 1

    with pytest.raises(ConfigurationError, match="DeepSpeedPlugin"):
        active()
    with patch_environment(ACCELERATE_USE_DEEPSPEED="true"):
        assert active() == 1
