"""Bytes of dtypes, tensors and written sizes."""

import pytest
import torch

from accel_core.errors import ConfigurationError
from accel_core.modules.sizes import (
    as_dtype,
    convert_file_size_to_int,
    dtype_byte_size,
    id_tensor_storage,
    tensor_bytes,
)
from accel_core.options.enums import CustomDtype


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("1GiB", 2**30),
        ("1GB", 10**9),
        ("1.5GB", 1_500_000_000),
        ("0.5MiB", 2**19),
        ("1Gb", 125_000_000),
        (10, 10),
        (10.5, 10),
    ],
)
def test_written_sizes_become_bytes(written: str | float, count: int) -> None:
    """Decimal, binary and bit units are told apart."""
    assert convert_file_size_to_int(written) == count


@pytest.mark.parametrize("written", ["1000", -1, "1GiBx", "", "GB", "-1GB", "9" * 5000 + "GB", 10**4000])
def test_what_is_no_size_is_refused(written: str | int) -> None:
    """Text without a unit, negative counts and trailing letters are refused by value."""
    with pytest.raises(ConfigurationError, match=r"neither a count of bytes.*string with a unit"):
        convert_file_size_to_int(written)


def test_custom_dtypes_have_fractions_of_a_byte() -> None:
    """Packed formats take half and quarter bytes; torch's own dtypes their item size."""
    assert dtype_byte_size(CustomDtype.INT4) == 0.5
    assert dtype_byte_size(CustomDtype.INT2) == 0.25
    assert dtype_byte_size(CustomDtype.FP8) == 1
    assert dtype_byte_size(torch.bool) == 1 / 8
    assert dtype_byte_size(torch.bfloat16) == 2


def test_only_floating_tensors_shrink() -> None:
    """Loading in a dtype narrows floating point tensors, never widens them and leaves integers alone."""
    assert tensor_bytes(torch.zeros(4), torch.float16) == 8
    assert tensor_bytes(torch.zeros(4, dtype=torch.float16), torch.float32) == 8
    assert tensor_bytes(torch.zeros(4, dtype=torch.int64), torch.float16) == 32
    assert tensor_bytes(torch.zeros(3), CustomDtype.INT4) == 2
    assert tensor_bytes(torch.zeros(4, device="meta")) == 16


def test_dtype_names_are_read_with_and_without_prefix() -> None:
    """A name gives torch's dtype; an unknown one is refused."""
    assert as_dtype("torch.float16") is as_dtype("float16") is torch.float16
    assert as_dtype(None) is None
    with pytest.raises(ConfigurationError, match=r"Unknown dtype.*'float17'"):
        as_dtype("float17")


def test_views_share_their_storage_identity() -> None:
    """A view and its base have one identity, another tensor has another."""
    base = torch.zeros(4)
    assert id_tensor_storage(base[1:]) == id_tensor_storage(base)
    assert id_tensor_storage(torch.zeros(4)) != id_tensor_storage(base)
