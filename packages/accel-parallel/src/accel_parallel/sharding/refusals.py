"""Refuses uses of a sharded model that torch answers with errors of its own, or a crash."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from accel_core.errors import EngineUnavailableError, PreparationError
from accel_core.mesh.tensor import is_spread, placed_like
from accel_core.process.world import World


def refuse_gloo(world: World) -> None:
    """Refuse gloo between GPUs: it sums and copies there, but crashes in collectives that gather parts of tensors."""
    if world.device.type != "cpu" and f"{world.device.type}:gloo" in dist.get_backend_config():
        raise EngineUnavailableError(
            f"Ranks that split a model exchange parts of tensors by the backend of their device; got gloo for "
            f"{world.device.type}, which ended processes without an error in torch 2.11. Leave the backend out, with a "
            "device for each rank, or compute on the CPU."
        )


def cut_what_is_loaded(model: torch.nn.Module) -> None:
    """Let `load_state_dict` take whole weights, the same on every rank, for distributed parameters; nothing is sent."""
    model.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _cut(model: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if is_spread(parameter) and isinstance(value, torch.Tensor):  # torch does not copy a whole tensor into parts
            state[prefix + name] = placed_like(value.detach(), parameter)


def refuse_calls(model: nn.Module, method: str, message: str) -> None:
    """Let a method of a model end in an error."""
    vars(model)[method] = partial(_refuse, message)


def _refuse(message: str, *args: object, **kwargs: object) -> None:
    raise EngineUnavailableError(message)


def refuse_copies(model: torch.nn.Module) -> None:
    """Let `copy.deepcopy` of a sharded model, which `AveragedModel` calls too, end in an error that names the way."""
    refuse_calls(
        model,
        "__deepcopy__",
        f"A sharded model cannot be copied; got a {type(model).__name__}. Copy it before prepare(), and prepare both; "
        "for an average of its weights, call accelerator.ema(model).",
    )


def refuse_resizing(model: torch.nn.Module) -> None:
    """Let `resize_token_embeddings` of a model, or of one inside it, end in an error that names the way."""
    # It would make whole embeddings of what shards and optimizers go on with.
    for module in model.modules():
        if hasattr(module, "resize_token_embeddings"):
            refuse_calls(
                module,
                "resize_token_embeddings",
                "Embeddings of a sharded model cannot be replaced; got resize_token_embeddings of a prepared "
                f"{type(module).__name__}. Call it before prepare(), and create the optimizer after it.",
            )


def refuse_gradients_of_gradients(model: torch.nn.Module) -> None:
    """Refuse `create_graph=True` through a sharded model: torch frees the weights that the second pass reads."""
    model.register_forward_hook(_watch)


def _watch(model: torch.nn.Module, args: object, output: object) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]


def _refuse_graph(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward pass, only with create_graph=True
        raise EngineUnavailableError(
            "Gradients through a sharded model cannot be differentiated again, as its weights are freed in between; "
            "got create_graph=True. Train without FSDP, or compute the penalty with a model that is not sharded."
        )


def refuse_sparse_gradients(model: torch.nn.Module) -> None:
    """Refuse layers whose gradients are sparse, which neither version of FSDP reduces."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    found = [name for name, each in layers.items() if each.sparse and each.weight.requires_grad]
    if found:
        raise PreparationError(
            f"Gradients of sharded parameters are dense; got sparse=True in {', '.join(found)}. Set sparse=False, "
            "or train without FSDP."
        )
