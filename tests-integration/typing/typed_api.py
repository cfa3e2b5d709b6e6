"""What a type checker has to see in accel: this file is checked, and never run.

A line that ends in `# error` has to be refused.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import accel
import accelerate.utils
from accel import Accelerator
from accel_bigmodel import init_empty_weights


class Net(nn.Module):
    """A model with a method of its own."""

    def embed(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


def one(accelerator: Accelerator, model: Net) -> None:
    """`prepare` of one object returns its type."""
    assert_type(accelerator.prepare(model), Net)
    accelerator.prepare(model).embed(torch.ones(1))
    accelerator.prepare(model).embde(torch.ones(1))  # error


def several(accelerator: Accelerator, model: Net, optimizer: torch.optim.SGD, loader: DataLoader[Tensor]) -> None:
    """`prepare` of several returns a tuple of their types, in their order."""
    assert_type(accelerator.prepare(model, optimizer), tuple[Net, torch.optim.SGD])
    assert_type(accelerator.prepare(loader, model, optimizer), tuple[DataLoader[Tensor], Net, torch.optim.SGD])
    six = accelerator.prepare(model, loader, loader, model, optimizer, model)
    assert_type(six, tuple[Net, DataLoader[Tensor], DataLoader[Tensor], Net, torch.optim.SGD, Net])
    prepared = accelerator.prepare(model, optimizer)
    swapped: tuple[torch.optim.SGD, Net] = prepared  # error
    del swapped


def facts(accelerator: Accelerator) -> None:
    """What a run tells about itself has plain types."""
    assert_type(accelerator.num_processes, int)
    assert_type(accelerator.is_main_process, bool)
    assert_type(accelerator.device, torch.device)
    assert_type(accelerator.sync_gradients, bool)


def flat() -> None:
    """The names of `import accel` are the types of their packages, and a misspelled one is refused."""
    assert_type(accel.Accelerator(), Accelerator)
    accel.Acelerator()  # error


def old_paths() -> None:
    """So are those of the drop-in, whether a module lists a name or takes it with a list of another."""
    assert_type(accelerate.Accelerator(), Accelerator)
    assert_type(accelerate.utils.is_wandb_available(), bool)
    accelerate.utils.set_seed("zero")  # error
    accelerate.utils.is_wandb_avialable()  # error


def empty() -> nn.Linear:
    """Contexts keep what is made in them."""
    with init_empty_weights():
        layer = nn.Linear(2, 2)
    return layer


def engines() -> None:
    """A plugin is that of its engine, whose package need not be there where core is used."""
    fsdp, megatron = accel.FullyShardedDataParallelPlugin(fsdp_version=2), accel.MegatronLMPlugin()
    Accelerator(fsdp_plugin=fsdp)
    Accelerator(megatron_lm_plugin=megatron)
    Accelerator(fsdp_plugin=megatron)  # error
    Accelerator(megatron_lm_plugin="megatron")  # error
    Accelerator(deepspeed_plugin=fsdp)  # error


def refused(model: Any) -> None:
    """Arguments are checked."""
    Accelerator(gradient_accumulation_steps="two")  # error
    Accelerator(gradient_acumulation_steps=2)  # error
    accel.set_seed("zero")  # error
    del model
