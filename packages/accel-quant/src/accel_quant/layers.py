"""Replaces linear layers by packed ones, and decides which are left alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accel_core.errors import QuantizationError
from accel_core.logging import get_logger
from accel_core.modules import packed
from accel_core.modules.ties import find_tied_parameters
from accel_quant import formats
from accel_quant.config import BnbQuantizationConfig
from accel_quant.library import bitsandbytes, is_instance

logger = get_logger(__name__)
_ = formats  # registers the formats, so that packed weights are counted, moved and offloaded correctly


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: list[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Replace every `nn.Linear` by a packed layer; weights are packed when they are moved to a device.

    A layer stays, and is named in a warning, whose weight its parent reads by itself (`nn.MultiheadAttention`) or is
    computed of other weights (weight norm), and one of a subclass that computes something else than `nn.Linear`.
    What `modules_to_not_convert` names stays with everything below it.
    """
    prefix = ".".join(current_key_name or ())
    chosen = _linear_layers(model, prefix, modules_to_not_convert or ())
    for layer, places in chosen:
        made = _packed(layer, bnb_quantization_config)
        for parent, name in places:
            setattr(parent, name, made)
    if not chosen:
        logger.warning(
            "No linear layer of %s was replaced; nothing of it is packed. Check the model and the modules that are "
            "left out: %s.",
            type(model).__name__,
            modules_to_not_convert,
        )
    return model


def _linear_layers(
    model: nn.Module, prefix: str, left_out: Iterable[str]
) -> list[tuple[nn.Linear, list[tuple[nn.Module, str]]]]:
    """List the layers to pack, each with all its places; one that is skipped under any name stays unpacked."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    stay: set[nn.Module] = set()
    unfit: dict[nn.Module, str] = {}
    for path, parent in model.named_modules(remove_duplicate=False):  # a layer under two names is replaced at both
        for name, layer in parent._modules.items():
            full = ".".join(part for part in (prefix, path, name) if part)
            if isinstance(layer, nn.Linear) and not is_instance(layer, "Linear8bitLt", "Linear4bit"):
                places.setdefault(layer, []).append((parent, name))
                if any(is_named(full, key) for key in left_out):
                    stay.add(layer)
                elif isinstance(parent, nn.MultiheadAttention) or not _is_product(layer):
                    unfit[layer] = full
    named = sorted(name for layer, name in unfit.items() if layer not in stay)
    if named:
        logger.warning("Layers whose weight is not made or used as that of nn.Linear are not packed: %s.", named)
    return [(layer, found) for layer, found in places.items() if layer not in stay and layer not in unfit]


def _is_product(layer: nn.Linear) -> bool:
    """Return whether a layer computes what `nn.Linear` does; a subclass is tried with small weights."""
    if "weight" not in layer._parameters:
        return False
    if type(layer).forward is nn.Linear.forward:
        return True
    weight = torch.linspace(-1, 1, 12, device="cpu").reshape(3, 4)
    inputs = torch.linspace(-2, 3, 8, device="cpu").reshape(2, 4)
    bias = None if layer.bias is None else torch.linspace(1, 2, 3, device="cpu")
    tried = copy.copy(layer)  # the real weights may be empty, or too large to try
    tried.__dict__["_parameters"] = {"weight": weight, "bias": bias}
    tried.in_features, tried.out_features = 4, 3
    try:
        with torch.no_grad():
            found = type(layer).forward(tried, inputs)
    except Exception as error:
        logger.info("%s is not nn.Linear with another name: %s", type(layer).__name__, error)
        return False
    wanted = functional.linear(inputs, weight, bias)
    return isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


def is_named(name: str, key: str) -> bool:
    """Return whether a list's key matches a module: it is its name, or consecutive whole parts of it."""
    return f".{key}." in f".{name}."


def check_names(model: nn.Module, field: str, names: Iterable[str] | None) -> None:
    """Check that every name of a list matches a module."""
    known = [name for name, _ in model.named_modules() if name]
    lost = [key for key in names or () if not any(is_named(name, key) for name in known)]
    if lost:
        raise QuantizationError(
            f"{field} names modules that {type(model).__name__} does not have; got no module for {lost}. Its first "
            f"modules are {[name for name in known if '.' not in name][:8]}."
        )


def _packed(layer: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    bias = layer.bias is not None
    classes, data = bitsandbytes().nn, layer.weight.detach()
    size = layer.in_features, layer.out_features, bias
    if config.load_in_8bit:
        with torch.device("meta"):  # weights that would be thrown away take no memory
            made: Any = classes.Linear8bitLt(*size, has_fp16_weights=False, threshold=config.llm_int8_threshold)
        made.weight = classes.Int8Params(data, requires_grad=False, has_fp16_weights=False)
        # Also after a forward that raised: bitsandbytes moves the scales to the layer's state before it computes.
        made.register_forward_hook(_keep_scales, always_call=True)
    else:
        packing = {
            "compress_statistics": config.bnb_4bit_use_double_quant,
            "quant_type": config.bnb_4bit_quant_type,
        }
        with torch.device("meta"):
            made = classes.Linear4bit(*size, compute_dtype=config.bnb_4bit_compute_dtype, **packing)
        module = None if data.is_meta else made  # the layer learns of its packed state through it
        made.weight = classes.Params4bit(data, requires_grad=False, module=module, **packing)
        # Weights that are packed again for AVX-512 have rounded scales, and could not be saved as they were.
        made.support_avx512bf16_for_cpu = False
    made.register_state_dict_pre_hook(_refuse_repacked)
    made.register_state_dict_post_hook(_name_parts)
    made.bias = layer.bias
    made.requires_grad_(False)
    made.train(layer.training)
    return made  # type: ignore[no-any-return]


def _keep_scales(layer: Any, _inputs: object, _output: object) -> None:
    """Leave the scales with the weight after a forward, where bitsandbytes moves them to the layer's state.

    A layer whose weight is away again (offloaded) keeps nothing of it.
    """
    state = layer.state
    if layer.weight.is_meta:
        state.CB = state.SCB = None
    elif state.SCB is not None:
        layer.weight.SCB = state.SCB


def _refuse_repacked(layer: nn.Module, prefix: str, _keep_vars: bool) -> None:
    """Raise before a state dict is made of weights that bitsandbytes can only save changed."""
    if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
        raise QuantizationError(
            f"The weight of {prefix or type(layer).__name__} cannot be saved as it is; got one that bitsandbytes "
            "packed again for AVX-512, and rounded its scales. Leave support_avx512bf16_for_cpu False on the layer."
        )


def _name_parts(layer: Any, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    """Name the parts of an offloaded weight, so that its owner can fill them in."""
    weight = layer.weight
    if weight.is_meta:
        form = packed.find(weight)
        parts = () if form is None else form.parts(weight)
        for suffix in parts:
            state.setdefault(prefix + (suffix or "weight"), torch.empty(0, dtype=torch.uint8, device="meta"))


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Name the modules that are better left unpacked: the output head, and those with tied weights."""
    tied = [name for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    is_base_model = prefix is not None and not hasattr(model, prefix)
    if not tied and is_base_model:
        return []
    children = [name for name, _ in model.named_children()]
    names = [*tied, *children[-1:]]  # the last child is the output head
    return list(dict.fromkeys(name.removesuffix(".weight").removesuffix(".bias") for name in names))


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(parameter.parameters()).device


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a model holds a 4-bit layer of bitsandbytes."""
    return any(is_instance(module, "Linear4bit") for module in model.modules())
