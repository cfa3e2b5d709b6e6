"""Tests of the packed formats that accel-core knows of after this package is imported."""

import bitsandbytes as bnb
import pytest
import torch

from accel_core.errors import CheckpointDamagedError, QuantizationError
from accel_core.modules import packed
from accel_core.modules.sizes import tensor_bytes
from accel_quant.formats import EIGHT_BITS, FOUR_BITS

CPU, META = torch.device("cpu"), torch.device("meta")


def _weight(rows=96, columns=128):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def _empty(form, quant_type="nf4", nested=False, rows=96, columns=128):
    data = torch.empty(rows, columns, device="meta")
    if form is EIGHT_BITS:
        return bnb.nn.Int8Params(data, requires_grad=False, has_fp16_weights=False)
    return bnb.nn.Params4bit(data, requires_grad=False, quant_type=quant_type, compress_statistics=nested)


CASES = [
    pytest.param(lambda: _empty(EIGHT_BITS), EIGHT_BITS, id="8bit"),
    pytest.param(lambda: _empty(FOUR_BITS), FOUR_BITS, id="nf4"),
    pytest.param(lambda: _empty(FOUR_BITS, nested=True), FOUR_BITS, id="nf4-double"),
    pytest.param(lambda: _empty(FOUR_BITS, "fp4"), FOUR_BITS, id="fp4"),
    pytest.param(lambda: _empty(FOUR_BITS, "fp4", nested=True), FOUR_BITS, id="fp4-double"),
]


def _value(parameter):
    if isinstance(parameter, bnb.nn.Int8Params):
        return parameter.detach().float() * parameter.SCB[:, None] / 127
    return bnb.functional.dequantize_4bit(parameter.data, parameter.quant_state)


@pytest.mark.parametrize(("make", "form"), CASES)
def test_packing_is_that_of_bitsandbytes(make, form):
    """Packed weights equal those that bitsandbytes packs by itself, and the given value is left as it was."""
    value = _weight()
    made = form.pack(make(), value, CPU)
    if form is EIGHT_BITS:
        by_hand = bnb.nn.Int8Params(_weight(), requires_grad=False, has_fp16_weights=False).to("cpu")
    else:
        empty = make()
        by_hand = bnb.nn.Params4bit(
            _weight(),
            requires_grad=False,
            quant_type=empty.quant_type,
            compress_statistics=empty.compress_statistics,
        ).to("cpu")
    assert torch.equal(made.data, by_hand.data)
    assert torch.equal(_value(made), _value(by_hand))
    assert torch.equal(value, _weight())


@pytest.mark.parametrize(("make", "form"), CASES)
def test_unpack_and_rebuild_are_exact(make, form):
    """Bytes and parts are known before packing; what is unpacked rebuilds to the same bits, as moving keeps them."""
    empty = make()
    assert packed.find(empty) is form
    assert isinstance(form, packed.PackedParameter)
    assert packed.find(torch.nn.Parameter(torch.ones(1))) is None
    made = form.pack(empty, _weight(), CPU)
    moved = form.move(made, CPU)
    assert torch.equal(_value(moved), _value(made))
    assert not moved.requires_grad
    parts = form.unpack(made)
    assert set(parts) == set(form.parts(empty))
    held = sum(part.nbytes for name, part in parts.items() if "quant_state" not in name)
    assert form.nbytes(made) == held + (4 if getattr(empty, "compress_statistics", False) else 0)
    assert form.nbytes(empty) == form.nbytes(made) == form.nbytes(form.move(made, META))
    assert tensor_bytes(empty, torch.float16) == form.nbytes(made)
    stand_in = form.move(made, META)
    assert stand_in.is_meta
    assert packed.find(stand_in) is form
    stored = {name: part.clone() for name, part in parts.items()}
    again = form.rebuild(stand_in, stored, CPU)
    assert torch.equal(again.data, made.data)
    assert torch.equal(_value(again), _value(made))
    assert {name: part.tolist() for name, part in form.unpack(again).items()} == {
        name: part.tolist() for name, part in parts.items()
    }


@pytest.mark.parametrize(("make", "form"), CASES)
def test_parts_that_do_not_fit_are_refused(make, form):
    """Refused are another shape, bare packed tensors (8 bits take one with its scales), cut parts and another's."""
    with pytest.raises(QuantizationError, match=r"got shape \(3, 3\) for \(96, 128\)"):
        form.pack(make(), torch.ones(3, 3), CPU)
    bare = torch.zeros(96, 128, dtype=torch.int8 if form is EIGHT_BITS else torch.uint8)
    with pytest.raises(QuantizationError, match=r"scales|statistics"):
        form.pack(make(), bare, CPU)
    with pytest.raises(QuantizationError, match="not packed yet"):
        form.unpack(make())
    made = form.pack(make(), _weight(), CPU)
    stand_in, parts = form.move(made, META), form.unpack(made)
    for suffix, part in parts.items():
        with pytest.raises(CheckpointDamagedError, match=r"do not fit it; got .*(shape|quant_state)"):
            form.rebuild(stand_in, {**parts, suffix: part[: len(part) // 2]}, CPU)
    other = form.pack(_empty(form, rows=128, columns=96), _weight(128, 96), CPU)
    with pytest.raises(CheckpointDamagedError, match="do not fit it"):
        form.rebuild(form.move(other, META), parts, CPU)
    if form is EIGHT_BITS:
        again = form.pack(make(), made.detach(), CPU, statistics=made.SCB)
        assert torch.equal(_value(again), _value(made))
        with pytest.raises(CheckpointDamagedError, match=r"SCB of shape \(3,\)"):
            form.pack(make(), made.detach(), CPU, statistics=made.SCB[:3])
