"""Where the parts of a packed model go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel import get_balanced_memory, infer_auto_device_map
from accel_core.errors import DeviceMapError
from accel_core.logging import get_logger
from accel_quant import formats
from accel_quant.config import BnbQuantizationConfig
from accel_quant.layers import is_named

logger = get_logger(__name__)

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")
_ = formats  # registers the formats, so that packed bytes are counted


def default_device() -> int | str:
    """Return the accelerator of this process, or `"cpu"`."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu"
    index = torch.accelerator.current_device_index()
    return index if accelerator.type == "cuda" else f"{accelerator.type}:{index}"  # a bare number means CUDA


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Find or check the device map of a model whose layers were replaced; packed layers count their packed bytes.

    Without a map all goes to the accelerator, or to the CPU where there is none.

    Raises:
        DeviceMapError: An unknown word.
    """
    if device_map is None:
        device = default_device()
        logger.info("The device map was not set; everything goes to %s.", device)
        return {"": device}
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in _WORDS:
        raise DeviceMapError(
            f"A string for `device_map` has to be one of {', '.join(_WORDS)}; got {device_map!r}. Choose one "
            "of them, or pass a map."
        )
    fp32 = bnb_quantization_config.keep_in_fp32_modules or ()
    special = {name: torch.float32 for name, _ in model.named_parameters() if any(is_named(name, key) for key in fp32)}
    facts: dict[str, Any] = {
        "no_split_module_classes": no_split_module_classes,
        "dtype": bnb_quantization_config.torch_dtype,
        "special_dtypes": special,
    }
    limits: Mapping[int | str, int | str] | None = max_memory
    if device_map != "sequential":
        limits = get_balanced_memory(model, max_memory=limits, low_zero=device_map == "balanced_low_0", **facts)
    return infer_auto_device_map(model, max_memory=limits, **facts)
