"""What the documentation says of utilities, on one process, where the tests of the engine do not show it."""

import pytest
from torch import nn

from accelerate import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs, utils


def test_handlers_reach_what_they_are_for(fresh_state: None) -> None:
    """The handler of each kind is the Accelerator's, and two of a kind are refused."""
    scaler = GradScalerKwargs(growth_interval=7)
    accelerator = Accelerator(kwargs_handlers=[scaler, DistributedDataParallelKwargs(static_graph=True)])
    assert accelerator.scaler_handler is scaler
    assert accelerator.ddp_handler.static_graph
    with pytest.raises(ValueError, match=r"GradScalerKwargs"):
        Accelerator(kwargs_handlers=[scaler, GradScalerKwargs()])


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
