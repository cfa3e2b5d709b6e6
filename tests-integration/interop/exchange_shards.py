"""What `exchange.py` does on two ranks with models that torch's FSDP shards, through the functions for one model.

Accelerate shards nothing on a CPU, so models are sharded by hand; its functions save and load those too.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

# Of version 1, torch writes whole states through a copy to the CPU, and crashes where they are there already.
CASES = {
    "fsdp2 whole": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": True},
    "fsdp2 shards": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    "fsdp1 shards": {"fsdp_version": 1, "state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False},
}


class Claiming:
    """An accelerator that says that it shards with a version of FSDP, as Accelerate's does on a GPU.

    Args:
        accelerator: What it is otherwise.
        version: The version.
    """

    def __init__(self, accelerator: Any, version: int) -> None:
        self.accelerator, self.is_fsdp2 = accelerator, version == 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)


def shard(model: nn.Module, version: int, size: int) -> nn.Module:
    """Return a model that is sharded over all ranks, its first layer on its own."""
    mesh = init_device_mesh("cpu", (size,))
    if version == 2:
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    given: dict[str, Any] = {"device_mesh": mesh, "device_id": torch.device("cpu"), "use_orig_params": True}
    model[0] = FullyShardedDataParallel(model[0], **given)
    return FullyShardedDataParallel(model, **given)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train on data that differs from step to step."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).square().mean().backward()
        optimizer.step()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return what this rank holds of weights and moments."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        entries = {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
        found |= {name: parameter.detach(), **entries}
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}
    return copy.deepcopy(local)


def exchange(accelerator: Any, action: str, directory: Path) -> None:
    """Train, save and go on, or load and go on, in every case."""
    for case, settings in CASES.items():
        plugin = FullyShardedDataParallelPlugin(**settings)
        torch.manual_seed(1 if action == "write" else 2)
        model = shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), plugin.fsdp_version, accelerator.num_processes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if action == "write" else 0.5)
        folder = directory / case
        if accelerator.is_main_process:
            folder.mkdir(exist_ok=True)
        accelerator.wait_for_everyone()
        train(model, optimizer, 2 if action == "write" else 1)
        given = plugin, Claiming(accelerator, plugin.fsdp_version)
        if action == "write":
            fsdp_utils.save_fsdp_model(*given, model, str(folder))
            fsdp_utils.save_fsdp_optimizer(*given, optimizer, model, str(folder))
        else:
            fsdp_utils.load_fsdp_model(*given, model, str(folder))
            fsdp_utils.load_fsdp_optimizer(*given, optimizer, model, str(folder))
        accelerator.wait_for_everyone()
        train(model, optimizer, 2)
        torch.save(held(model, optimizer), directory / f"{action}-{case}-{accelerator.process_index}.pt")
