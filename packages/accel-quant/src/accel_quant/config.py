"""What a user asks of quantization."""

from __future__ import annotations

import warnings
from dataclasses import field
from typing import Any

import torch

from accel_core._records import record
from accel_core.errors import QuantizationError
from accel_core.options.enums import CustomDtype

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_QUANT_TYPES = ("fp4", "nf4")


@record
class BnbQuantizationConfig:
    """How the linear layers of a model are packed with bitsandbytes.

    Attributes:
        load_in_8bit: Pack to 8 bits a weight, with one scale a row (LLM.int8(), Dettmers et al. 2022).
        llm_int8_threshold: With 8 bits: input columns with a value of at least this size are computed unpacked;
            0 packs them all.
        load_in_4bit: Pack to 4 bits a weight, with one scale for each 64 (QLoRA, Dettmers et al. 2023).
        bnb_4bit_quant_type: With 4 bits: `fp4`, or `nf4` for values that are normally distributed.
        bnb_4bit_use_double_quant: With 4 bits: pack the scales too.
        bnb_4bit_compute_dtype: With 4 bits: dtype of the products: `fp32`, `fp16`, `bf16`, or a torch dtype.
        torch_dtype: Dtype of what is not packed; by default the compute dtype with 4 bits, float16 with 8.
        skip_modules: Names of modules that stay unpacked, in `torch_dtype`; by default the output head and what is tied
            to another weight.
        keep_in_fp32_modules: Names of modules that stay unpacked, in float32.

    Raises:
        QuantizationError: Neither or both of 8 and 4 bits, or a value that is not valid.

    Examples:
        >>> config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16")
        >>> config.torch_dtype  # of what is not packed
        torch.bfloat16
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str = "fp16"
    torch_dtype: torch.dtype = None  # type: ignore[assignment]
    skip_modules: list[str] = None  # type: ignore[assignment]
    keep_in_fp32_modules: list[str] = None  # type: ignore[assignment]
    target_dtype: torch.dtype | CustomDtype = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise QuantizationError(f"{name} must be a boolean; got {getattr(self, name)!r}. Use True or False.")
        if self.load_in_4bit and self.load_in_8bit:
            raise QuantizationError(
                "load_in_4bit and load_in_8bit can't be both True; a weight is packed once. Choose one of them."
            )
        if not (self.load_in_4bit or self.load_in_8bit):
            raise QuantizationError(
                "load_in_4bit and load_in_8bit can't be both False; nothing would be packed. Set one of them."
            )
        if isinstance(self.llm_int8_threshold, bool) or not isinstance(self.llm_int8_threshold, int | float):
            raise QuantizationError(
                f"llm_int8_threshold must be a float or an int; got {self.llm_int8_threshold!r}. Use 6.0, or 0 to "
                "pack every column."
            )
        if self.bnb_4bit_quant_type not in _QUANT_TYPES:
            raise QuantizationError(
                f"bnb_4bit_quant_type must be in {list(_QUANT_TYPES)}; got {self.bnb_4bit_quant_type!r}. Use nf4 "
                "for trained weights."
            )
        for name in ("skip_modules", "keep_in_fp32_modules"):
            names = getattr(self, name)
            if names is not None and not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
                raise QuantizationError(
                    f"{name} must be a list of strings; got {names!r}. Write for example ['lm_head']."
                )
        compute: Any = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        self.bnb_4bit_compute_dtype = compute
        if self.torch_dtype is None:
            self.torch_dtype = compute if self.load_in_4bit else torch.float16  # 8-bit kernels compute in fp16
        else:
            self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warnings.warn(
                "llm_int8_threshold can only be used for model loaded in 8bit; 4 bits have no threshold. Leave it out.",
                stacklevel=3,
            )
        self.target_dtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4


def _dtype(name: str, value: object) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str) or value not in _DTYPES:
        raise QuantizationError(
            f"{name} must be a torch.dtype or a string in {list(_DTYPES)}; got {value!r}. Use one of them."
        )
    return _DTYPES[value]
