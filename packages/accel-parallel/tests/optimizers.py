"""Prints docs/reference/optimizers.md, made from the tables that `ranks/test_sharded_optimizers.py` proves.

Run it from the root of the repository after one of them has changed:

    python packages/accel-parallel/tests/optimizers.py > docs/reference/optimizers.md
"""

import sys
from collections.abc import Iterator
from itertools import groupby

from accel_parallel.sharding.optimizers import EQUAL, IN_BLOCKS, REFUSED

HEAD = """# Optimizers

<!-- Written by packages/accel-parallel/tests/optimizers.py. -->

Which optimizer trains what one process trains, where ranks hold copies of a model (data parallel), shards of it (FSDP2,
FSDP1), or parts that tensor parallel makes. "equal" was measured step by step against one process, to 1e-6, with each
way to step (`foreach`, `fused`) that an optimizer has, and "refused" is what `prepare` does, for subclasses too, before
anything is changed.

| optimizer | data parallel | FSDP2 | tensor parallel | FSDP2 and tensor parallel | FSDP1 | why, and what to use |
|---|---|---|---|---|---|---|"""
FOOT = """
`torch.optim.Muon` under FSDP2: each matrix is orthogonalized once in a window, on one rank, its owner. Momentum is
gathered there, and the update is scattered. Owners take turns, the largest matrices first. That is so with copies of
shards and with tensor parallel too; with expert parallel, torch computes with whole matrices on every rank. Products
are in bfloat16, as without accel, and gradients of several ranks are rounded in another order before.

`torch.optim.LBFGS` on copies of a model: let its closure return the loss of all ranks,
`accelerator.reduce(loss, "mean")`, or ranks may end their steps apart. SGD and Adagrad with `fused=True` step without
it on distributed tensors. torchao keeps state of 4096 numbers or more in few bits, in blocks. A shard that is smaller,
or is cut inside of a block, has state in 32 bits, nearer to exact than the whole has. bitsandbytes and
torchao were not compared under FSDP1. On the CPU, where all of this ran, torchao ran uncompiled.

Optimizers that are not listed are not refused. One that treats each element on its own is right. Under FSDP2 and tensor
parallel, one that does more computes with the whole, or ends in an error of torch in the first step; under FSDP1 it
sees one-dimensional pieces and may be **silently wrong**.
[`accel verify-parallel`](../tutorials/verify-parallel.md) compares your script with one process."""
_WAYS = ({"distributed", "several"}, {"distributed", "several", "split"}, {"distributed", "several", "split"}, {"flat"})
"""The forms of parameters in each column but the first, as `Refused` has them."""


def lines() -> Iterator[str]:
    """Return the lines of the page."""
    yield HEAD
    for library, names in groupby(EQUAL, key=lambda name: name.partition(".")[0]):
        flat = "equal" if library == "torch" else "not compared"
        yield _row(names, ["equal"] * 4 + [flat], "")
    for row, found in groupby(REFUSED.items(), key=lambda item: item[1]):
        keys = [name for name, _ in found]
        ways = ["refused" if forms & set(row.forms) else "equal" for forms in _WAYS]
        if keys[0] in IN_BLOCKS or keys[0].startswith("bitsandbytes"):
            ways[-1] = "not compared"
        yield _row(keys, ["equal", *ways], f"{row.why}. {row.instead}")
    yield FOOT


def _row(names: Iterator[str] | list[str], ways: list[str], why: str) -> str:
    shown = ", ".join(f"`{name}`" for name in names).replace("bitsandbytes.Optimizer8bit", "bitsandbytes.*8bit")
    return f"| {' | '.join((shown, *ways, why))} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
