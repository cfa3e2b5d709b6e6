"""The packed parameters of bitsandbytes, as accel-core's `PackedParameter` sees them.

Imported, this module registers both formats, so that sizes, device maps, loading and offload count and move packed
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_core.errors import QuantizationError
from accel_core.modules import packed
from accel_quant.library import bitsandbytes, is_instance
from accel_quant.statistics import check_statistics

_NESTED_BLOCK = 256
_CODES = 16
_NESTED_CODES = 256
_FLOAT = 4
_SHAPE = "accel_shape"
_SETTINGS = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")


class EightBits:
    """Weights of 8 bits with one float32 scale a row."""

    name = "bitsandbytes-8bit"

    def matches(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is of this format."""
        return is_instance(parameter, "Int8Params")

    def nbytes(self, parameter: torch.Tensor) -> int:
        """Count the bytes of weights and scales once they are packed."""
        return parameter.numel() + _FLOAT * parameter.shape[0]

    def move(self, parameter: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the same weights on another device."""
        if parameter.dtype != torch.int8:
            return self._made(parameter.detach().to(device), None)
        scales = vars(parameter)["SCB"]
        if device.type != "meta" and scales is None:
            raise QuantizationError(
                "An 8-bit weight without its scales cannot be moved; got SCB empty. Load the weight first, or make "
                "its layer with replace_with_bnb_layers, which keeps them after a forward."
            )
        return self._made(parameter.detach().to(device), None if scales is None else scales.to(device))

    def pack(
        self, parameter: torch.Tensor, value: torch.Tensor, device: torch.device, statistics: torch.Tensor | None = None
    ) -> nn.Parameter:
        """Pack floating point weights, or take packed ones with their scales."""
        _check_shape(parameter, value)
        if value.dtype == torch.int8:
            if statistics is None:
                raise QuantizationError(
                    "Packed 8-bit weights come with their row scales; got none. Pass `fp16_statistics`, saved as SCB."
                )
            statistics = statistics.to(torch.float32)
            check_statistics({"": value, "SCB": statistics}, parameter.shape)
            return self._made(value.to(device), statistics.to(device))
        if device.type == "meta":
            return self._made(torch.empty(value.shape, dtype=torch.int8, device=device), None)
        copied = value.detach().to("cpu", copy=True)  # `to` packs, and must not touch the given weights
        made: Any = self._made(copied, None)
        result: nn.Parameter = made.to(device)
        return result

    def parts(self, parameter: torch.Tensor) -> Sequence[str]:
        """Name the weights and the scales."""
        return ("", "SCB")

    def unpack(self, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return weights and scales."""
        scales = vars(parameter)["SCB"]
        if parameter.dtype != torch.int8 or scales is None:
            raise QuantizationError(
                f"The weight is not packed yet; got {parameter.dtype}. Move it to its device first, which packs it."
            )
        return {"": parameter.detach(), "SCB": scales}

    def rebuild(
        self,
        parameter: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> nn.Parameter:
        """Make the parameter out of weights and scales that fit each other and the parameter."""
        check_statistics(stored, parameter.shape)
        return self._made(stored[""].to(device), stored["SCB"].to(device))

    def _made(self, data: torch.Tensor, scales: torch.Tensor | None) -> nn.Parameter:
        stored = {} if scales is None else {"CB": data, "SCB": scales}  # bitsandbytes takes both or neither
        make: Callable[..., nn.Parameter] = bitsandbytes().nn.Int8Params
        return make(data, requires_grad=False, has_fp16_weights=False, **stored)


class FourBits:
    """Weights of 4 bits, two a byte, with one scale for each block of 64, which may be packed too."""

    name = "bitsandbytes-4bit"

    def matches(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is of this format."""
        return is_instance(parameter, "Params4bit")

    def nbytes(self, parameter: torch.Tensor) -> int:
        """Count the bytes of weights, scales and code books once they are packed."""
        state = _state(parameter)
        if state is not None:
            count = parameter.nbytes + state.absmax.nbytes + state.code.nbytes
            if state.nested:
                count += state.state2.absmax.nbytes + state.state2.code.nbytes + state.offset.nbytes
            return int(count)
        weights = getattr(parameter, _SHAPE, parameter.shape).numel()
        blocks = -(-weights // (vars(parameter)["blocksize"] or 64))
        count = -(-weights // 2) + _FLOAT * _CODES  # two weights a byte, and the code book
        if not vars(parameter)["compress_statistics"]:
            return int(count + _FLOAT * blocks)
        # Scales are a byte each, with scales, a code book and an offset of their own.
        return int(count + blocks + _FLOAT * (-(-blocks // _NESTED_BLOCK) + _NESTED_CODES + 1))

    def move(self, parameter: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the same weights on another device; on meta, an empty parameter with the same settings."""
        state = _state(parameter)
        if device.type == "meta":
            made = self._like(parameter, parameter.detach().to(device))
            shape = _shape(parameter)
            if shape is not None:
                setattr(made, _SHAPE, shape)  # packed bytes have lost it
            return made
        if state is None:
            return self._like(parameter, parameter.detach().to(device))
        return self._assembled(self.unpack(parameter), device)

    def pack(
        self,
        parameter: torch.Tensor,
        value: torch.Tensor,
        device: torch.device,
        statistics: torch.Tensor | None = None,
    ) -> nn.Parameter:
        """Pack floating point weights into 4 bits."""
        if not value.is_floating_point():
            raise QuantizationError(
                f"Packed 4-bit weights come with their statistics; got a bare tensor of {value.dtype}. Use `rebuild`, "
                "or load the checkpoint with load_and_quantize_model."
            )
        _check_shape(parameter, value)
        if device.type == "meta":
            return self._like(parameter, torch.empty(value.shape, dtype=value.dtype, device=device))
        made: Any = self._like(parameter, value.detach().to("cpu", copy=True))
        result: nn.Parameter = made.to(device)
        return result

    def parts(self, parameter: torch.Tensor) -> Sequence[str]:
        """Name the weights and the parts of their state."""
        names = ["", "weight.absmax", "weight.quant_map"]
        if vars(parameter)["compress_statistics"]:
            names += ["weight.nested_absmax", "weight.nested_quant_map"]
        return (*names, f"weight.quant_state.bitsandbytes__{vars(parameter)['quant_type']}")

    def unpack(self, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return weights and the parts of their state, as bitsandbytes saves them."""
        state = _state(parameter)
        if state is None:
            raise QuantizationError(
                f"The weight is not packed yet; got {parameter.dtype}. Move it to its device first, which packs it."
            )
        if getattr(state, "packing_format_for_cpu", False):
            raise QuantizationError(
                "The weight was packed again for AVX-512, which rounds its scales and cannot be undone exactly; got "
                "such a state. Use accel_quant's layers, which leave that off, or set support_avx512bf16_for_cpu=False "
                "on the layer before its first forward."
            )
        parts = {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
        return {"": parameter.detach(), **parts}

    def rebuild(
        self, parameter: torch.Tensor, stored: Mapping[str, torch.Tensor], device: torch.device
    ) -> nn.Parameter:
        """Make the parameter out of weights and state that fit each other and the parameter."""
        check_statistics(stored, _shape(parameter))
        return self._assembled(stored, device)

    def _assembled(self, stored: Mapping[str, torch.Tensor], device: torch.device) -> nn.Parameter:
        statistics = {suffix.removeprefix("weight."): part for suffix, part in stored.items() if suffix}
        make: Callable[..., nn.Parameter] = bitsandbytes().nn.Params4bit.from_prequantized
        return make(stored[""], statistics, requires_grad=False, device=device)

    def _like(self, parameter: torch.Tensor, data: torch.Tensor) -> nn.Parameter:
        settings = {name: vars(parameter)[name] for name in _SETTINGS}
        make: Callable[..., nn.Parameter] = bitsandbytes().nn.Params4bit
        return make(data, requires_grad=False, **settings)


def _state(parameter: torch.Tensor) -> Any:
    state = vars(parameter)["quant_state"]
    return state if isinstance(state, bitsandbytes().functional.QuantState) else None  # a dict before packing


def _shape(parameter: torch.Tensor) -> torch.Size | None:
    """Return the shape of 4-bit weights before they were packed, if the parameter knows it."""
    state = _state(parameter)
    if state is not None:
        return torch.Size(state.shape)
    shape: torch.Size | None = getattr(parameter, _SHAPE, parameter.shape if parameter.is_floating_point() else None)
    return shape


def _check_shape(parameter: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != parameter.shape and parameter.is_floating_point():  # packed ones have another shape anyway
        raise QuantizationError(
            f"The weight does not fit its place; got shape {tuple(value.shape)} for {tuple(parameter.shape)}. Load a "
            "checkpoint of the same architecture."
        )


EIGHT_BITS = EightBits()
"""The registered format of 8-bit weights."""

FOUR_BITS = FourBits()
"""The registered format of 4-bit weights."""

packed.register(EIGHT_BITS)
packed.register(FOUR_BITS)
