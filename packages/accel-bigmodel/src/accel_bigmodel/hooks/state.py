"""The state dict of a model whose weights are partly elsewhere."""

import torch
from torch import nn

from accel_bigmodel.hooks.residency import residencies_of
from accel_bigmodel.placement import as_device, in_normal_mode
from accel_bigmodel.sizes import named_tensors


@in_normal_mode
def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's whole state dict on the CPU, offloaded weights included.

    Weights in files are returned as views of their memory maps: nothing is read before it is used.
    """
    shown = model.state_dict()
    state = {name: value for name, value in shown.items() if not isinstance(value, torch.Tensor)}  # extra state
    state |= {name: tensor.to("cpu") for name, tensor in shown.items() if name not in state and not tensor.is_meta}
    named = {id(module): name for name, module in model.named_modules()}
    names = list(shown)
    for module in model.modules():
        for name, tensor in _offloaded_of(module).items():
            full = f"{named[id(module)]}.{name}" if named[id(module)] else name
            state[full] = tensor.detach().to("cpu")
    # A tensor registered twice is offloaded under every name that its modules have.
    ties: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        ties.setdefault(id(tensor), []).append(name)
    for group in ties.values():
        found = next((state[name] for name in group if name in state), None)
        if found is not None:
            state.update({name: found for name in group if name in names})
    ordered = {name: state[name] for name in names if name in state}
    return {**ordered, **{name: tensor for name, tensor in state.items() if name not in ordered}}


@in_normal_mode
def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, torch.Tensor | str],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, torch.Tensor | str]:
    """Replace the empty tensors and names of files of one module in a state dict by its offloaded weights."""
    prefix = module_name.rpartition(".")[0]
    device = as_device(device_to_put_offload)
    for name, tensor in _offloaded_of(module).items():
        full = f"{prefix}.{name}" if prefix else name
        if full in state_dict:
            state_dict[full] = tensor.detach().to(device)
    return state_dict


def _offloaded_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that a module's own hooks offload, by name in the module."""
    found: dict[str, torch.Tensor] = {}
    for residency in residencies_of(module):
        found.update(residency.values())
    return found


def held_by_hooks(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the state dict with all weights, offloaded ones on the CPU; `None` where hooks offload none of them."""
    offloads = any(residencies_of(module) for module in model.modules())
    return get_state_dict_offloaded_model(model) if offloads else None
