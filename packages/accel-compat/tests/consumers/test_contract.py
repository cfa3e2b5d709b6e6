"""What libraries read, write and call beyond the names of the surface and the hooks that accel-bigmodel tests."""

import inspect
from typing import Any

import pytest
from torch import nn

import accelerate
import accelerate.hooks
import accelerate.utils
from accel_testing import requires
from accelerate import Accelerator


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (accelerate.utils.save_fsdp_model, ["adapter_only"]),
        (accelerate.utils.load_fsdp_optimizer, ["adapter_only"]),
        (Accelerator.gather_for_metrics, ["use_gather_object"]),
        (Accelerator.__init__, ["dataloader_config", "parallelism_config"]),
    ],
)
def test_signatures_that_libraries_probe(function: Any, parameters: list[str]) -> None:
    """Parameters that libraries look for before they pass them are there."""
    assert set(parameters) <= set(inspect.signature(function).parameters)


def test_attributes_that_the_trainer_uses(fresh_state: None) -> None:
    """The attributes, private ones included, that the transformers Trainer reads and writes are there."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    assert accelerator._models == [model]
    assert accelerator.state.fsdp_plugin is None
    assert accelerator.state.deepspeed_plugin is None
    accelerator.gradient_state.plugin_kwargs.update({"num_steps": 5})
    assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == 5
    accelerator.gradient_state._set_sync_gradients(False)
    assert not accelerator.sync_gradients
    accelerator.gradient_state._set_sync_gradients(True)
    assert accelerator.step == 0
    assert accelerator.distributed_type is accelerator.state.distributed_type
    assert accelerator.optimizer_step_was_skipped is False
    accelerator.free_memory()
    assert accelerator._models == []


@requires("engine:deepspeed")
def test_deepspeed_configuration_can_be_subclassed() -> None:
    """Transformers subclasses the configuration and adds to it."""

    class Ours(accelerate.utils.deepspeed.HfDeepSpeedConfig):
        def __init__(self, source: dict[str, Any]) -> None:
            super().__init__(source)
            self.mismatches: list[str] = []

    config = Ours({"zero_optimization": {"stage": 3}})
    assert config.is_zero3()
    assert accelerate.utils.DeepSpeedPlugin(hf_ds_config=config).hf_ds_config is config
