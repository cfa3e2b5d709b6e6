"""Bytes of dtypes, tensors and written sizes."""

import re

import torch

from accel_core.errors import ConfigurationError
from accel_core.modules import packed
from accel_core.options.enums import CustomDtype

_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
_UNITS = {
    "TIB": 2**40, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10,
    "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3,
}  # fmt: skip
_WRITTEN_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d*)?|\.\d+)\s*([KMGT]i?[bB])\s*", re.IGNORECASE)


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> int | float:
    """Return the bytes of one element of a dtype.

    Args:
        dtype: A torch dtype, or a `CustomDtype` that torch has no dtype for.

    Returns:
        Bytes; a fraction for packed formats, and 1/8 for `torch.bool`, which counts its information.
        What a tensor really occupies is `tensor_bytes`.
    """
    if isinstance(dtype, CustomDtype):
        size = _CUSTOM_BYTES[dtype]
        return int(size) if size == int(size) else size
    if dtype == torch.bool:
        return 1 / 8
    return dtype.itemsize


def as_dtype(dtype: str | torch.dtype | CustomDtype | None) -> torch.dtype | CustomDtype | None:
    """Turn a dtype's name, with or without `torch.`, into the dtype."""
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(f"Unknown dtype; got {dtype!r}. Use a torch dtype or its name, such as 'bfloat16'.")
    return found


def tensor_bytes(tensor: torch.Tensor, dtype: torch.dtype | CustomDtype | None = None) -> int:
    """Count the bytes that a tensor occupies, or would occupy after loading it in a dtype."""
    form = packed.find(tensor)
    if form is not None:
        return form.nbytes(tensor)
    if dtype is None or not tensor.is_floating_point():
        return tensor.nbytes
    wanted = _CUSTOM_BYTES[dtype] if isinstance(dtype, CustomDtype) else dtype.itemsize
    if wanted >= tensor.element_size():
        return tensor.nbytes
    return -int(-tensor.numel() * wanted // 1)  # rounded up to whole bytes


def convert_file_size_to_int(size: float | str) -> int:
    """Turn a written size into bytes.

    Args:
        size: Bytes (a fraction is cut off), or a number with a unit: `"10GiB"` (2**30), `"10GB"` (10**9), `"10Gb"`
            (bits), from KB to TB.

    Returns:
        Bytes.

    Raises:
        ConfigurationError: When `size` is negative or not a size.
    """
    if isinstance(size, int | float) and 0 <= size < 2.0**1000:
        return int(size)
    match = _WRITTEN_SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ConfigurationError(
            f"`size` is neither a count of bytes nor a number with a unit; got {size!r:.80}. Use an "
            "integer for bytes, or a string with a unit (like '5.0GB')."
        )
    unit = match[2]
    count = float(match[1]) * _UNITS[unit.upper()]
    bits = unit.endswith("b") and not unit.lower().endswith("ib")
    return int(count // 8) if bits else int(count)


def written_size(count: int) -> str:
    """Write bytes with a unit."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Identify the memory behind a tensor, so that tensors sharing it can be found.

    Args:
        tensor: Any strided tensor.

    Returns:
        Its device, the address of its storage (unique among living tensors of that device) and the storage's bytes.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()
