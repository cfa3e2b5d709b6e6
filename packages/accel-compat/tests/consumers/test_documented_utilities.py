"""What the documentation says of utilities, on one process, where the tests of the engine do not show it."""

from pathlib import Path

import pytest
from torch import nn

from accelerate import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs, utils
from accelerate.commands.config.default import write_basic_config


def test_handlers_reach_what_they_are_for(fresh_state: None) -> None:
    """The handler of each kind is the Accelerator's, and two of a kind are refused."""
    scaler = GradScalerKwargs(growth_interval=7)
    accelerator = Accelerator(kwargs_handlers=[scaler, DistributedDataParallelKwargs(static_graph=True)])
    assert accelerator.scaler_handler is scaler
    assert accelerator.ddp_handler.static_graph
    with pytest.raises(ValueError, match=r"GradScalerKwargs"):
        Accelerator(kwargs_handlers=[scaler, GradScalerKwargs()])


@pytest.mark.parametrize("mixed_precision", ["no", "fp16", "bf16"])
def test_basic_configuration_is_written(mixed_precision: str, tmp_path: Path) -> None:
    """A file for this machine is written where there is none, and left alone where there is one."""
    path = tmp_path / "default_config.yaml"
    assert write_basic_config(mixed_precision=mixed_precision, save_location=str(path)) == path
    text = path.read_text()
    assert f"mixed_precision: '{mixed_precision}'" in text or f"mixed_precision: {mixed_precision}" in text
    assert write_basic_config(save_location=str(path)) is False
    assert path.read_text() == text


def test_models_come_out_of_containers() -> None:
    """Containers are taken off, at the top or everywhere."""
    inner = nn.Linear(1, 1)
    assert utils.extract_model_from_parallel(nn.DataParallel(inner)) is inner
    outer = nn.Sequential(nn.DataParallel(nn.Linear(1, 1)))
    assert isinstance(utils.extract_model_from_parallel(outer, recursive=True)[0], nn.Linear)


def test_xla_is_installed_in_colab_only() -> None:
    """Elsewhere the helper refuses, and installs nothing."""
    with pytest.raises(RuntimeError, match=r"(?i)colab"):
        utils.install_xla()
