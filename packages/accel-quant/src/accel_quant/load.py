"""Loads a model with packed linear layers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import accel_bigmodel.hooks.state  # noqa: F401 - tells accel-core where offloaded weights are when a model is saved
from accel_bigmodel import (
    check_device_map,
    check_tied_parameters_on_same_device,
    dispatch_model,
    retie_parameters,
)
from accel_bigmodel.checkpoint.read import Checkpoint, open_checkpoint
from accel_bigmodel.device_map.check import check_devices
from accel_core.errors import OffloadError, OffloadFolderError, QuantizationError, undone_by
from accel_core.logging import get_logger
from accel_core.modules.ties import find_tied_parameters
from accel_quant import layers
from accel_quant.checkpoint import WeightLoader
from accel_quant.config import BnbQuantizationConfig
from accel_quant.device_map import get_quantized_model_device_map

logger = get_logger(__name__)


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: dict[str, int | str | torch.device] | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
    *,
    expert_cache: int | str | None = None,
) -> nn.Module:
    """Pack the linear layers of a model with bitsandbytes, on a CPU as well as on a GPU.

    A model that is loaded is packed where it is. An empty one (on the meta device) is filled from a checkpoint, one
    weight after another, so that the unpacked model is never in memory as a whole; the checkpoint may be packed
    already, as `Accelerator.save_model` wrote it. Layers whose weights were tied are packed each on its own. Everything
    is checked first: when this raises, no weight was changed.

    Args:
        model: The model; its layers are replaced in place.
        bnb_quantization_config: How weights are packed.
        weights_location: A weights file, an index (`.json`), or a folder with one of them; needed for an empty model.
        device_map: Devices by name of module, or `auto`, `balanced`, `balanced_low_0`, `sequential`; by default the
            accelerator, or the CPU. Parts on "cpu" (beside an accelerator) and "disk" wait there packed.
        no_split_module_classes: Names of classes whose instances stay on one device.
        max_memory: Bytes or written sizes by device.
        offload_folder: Where packed weights on "disk" are written.
        offload_state_dict: Accepted: what goes to the CPU is mapped from its file and needs no room twice.
        expert_cache: As for `dispatch_model`: packed experts of a list come one by one, as they are called.

    Returns:
        The model, with `is_loaded_in_8bit`, `is_loaded_in_4bit`, `is_quantized` and `hf_device_map`.

    Raises:
        QuantizationError: No weights for an empty model, or a list that names no module.
        CheckpointMismatchError: The checkpoint does not fit the model.
        CheckpointError: The checkpoint is missing, damaged or unsafe.
        DeviceMapError: The map misses a weight.
        DeviceUnavailableError: The map names a device that is not here.
        OffloadError: Weights go to "disk" and there is no folder that can be written.

    Examples:
        >>> from accel import BnbQuantizationConfig, init_empty_weights
        >>> with init_empty_weights():
        ...     model = Net()
        >>> config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32")
        >>> model = load_and_quantize_model(model, config, weights_location="checkpoint", device_map={"": "cpu"})
        >>> scores = model(torch.rand(2, 64))
    """
    config = bnb_quantization_config
    layers.check_names(model, "skip_modules", config.skip_modules)
    layers.check_names(model, "keep_in_fp32_modules", config.keep_in_fp32_modules)
    source = _source_for(model, weights_location)
    skipped = config.skip_modules if config.skip_modules is not None else layers.get_keys_to_not_convert(model)
    left_out = [*skipped, *(config.keep_in_fp32_modules or ())]
    modules = model.named_modules(remove_duplicate=False)
    before = {name: module for name, module in modules if isinstance(module, nn.Linear)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shared = find_tied_parameters(model)
    layers.replace_with_bnb_layers(model, config, modules_to_not_convert=left_out)
    with undone_by(lambda: _put_back(model, before, trained)):
        places = get_quantized_model_device_map(
            model, config, device_map, max_memory=max_memory, no_split_module_classes=no_split_module_classes
        )
        check_device_map(model, places)
        check_devices(places)
        # Packed layers are no longer tied: with one packed weight in two of them, bitsandbytes computes wrong numbers.
        tied = find_tied_parameters(model)
        check_tied_parameters_on_same_device(tied, places)
        _check_folder(places, offload_folder)
        loader = WeightLoader(model, config, places, offload_folder, shared)
        if source is not None:
            loader.check(source)
    if source is not None:
        loader.load_from_checkpoint(source)
    else:
        loader.load_from_model()
    retie_parameters(model, tied)
    object.__setattr__(model, "is_loaded_in_4bit", config.load_in_4bit)
    object.__setattr__(model, "is_loaded_in_8bit", config.load_in_8bit)
    object.__setattr__(model, "is_quantized", True)
    return _spread(model, places, loader.index, offload_folder, expert_cache)


def _source_for(model: nn.Module, weights_location: str | os.PathLike[str] | None) -> Checkpoint | None:
    """Return the checkpoint that an empty model is filled from; None for a model that is loaded already."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        logger.warning(
            "The model is loaded already and is packed in memory. To need less of it, make the model under "
            "init_empty_weights and pass weights_location."
        )
        return None
    if weights_location is None:
        raise QuantizationError(
            "`weights_location` needs to be where the weights of the model are; the model is empty (on the meta "
            "device) and there is none. Pass a file, an index or a folder."
        )
    return open_checkpoint(weights_location)


def _spread(
    model: nn.Module,
    places: dict[str, Any],
    index: Mapping[str, Any],
    offload_folder: str | os.PathLike[str] | None,
    expert_cache: int | str | None,
) -> nn.Module:
    """Put hooks on a model that is on several devices."""
    if expert_cache is None and len({str(device) for device in places.values()}) == 1 and "disk" not in places.values():
        object.__setattr__(model, "hf_device_map", dict(places))
        return model
    options: dict[str, Any] = {"offload_dir": offload_folder, "offload_index": index or None, "force_hooks": True}
    return dispatch_model(model, places, **options, expert_cache=expert_cache)


def _check_folder(places: Mapping[str, Any], offload_folder: str | os.PathLike[str] | None) -> None:
    parts = [name for name, device in places.items() if str(device) == "disk"]
    if not parts:
        return
    if offload_folder is None:
        raise OffloadFolderError(
            f"Packed weights on 'disk' have to be written somewhere; got {parts} there and no folder. Pass "
            "`offload_folder`."
        )
    try:
        os.makedirs(offload_folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=offload_folder):
            pass
    except OSError as failure:
        raise OffloadError(
            f"The offload folder {os.fspath(offload_folder)} cannot be written; the system says {failure}. Choose "
            "another."
        ) from failure


def _put_back(model: nn.Module, before: Mapping[str, nn.Module], trained: Sequence[nn.Parameter]) -> None:
    """Restore the original layers of a model."""
    for name, layer in before.items():
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        if getattr(parent, leaf) is not layer:
            setattr(parent, leaf, layer)
    for parameter in trained:
        parameter.requires_grad_(True)  # packed layers share their biases with those that they replace
