"""Layouts as they are written on a command line."""

from __future__ import annotations

import pytest

from accel_core.errors import ConfigurationError
from accel_core.mesh.layout import Layout
from accel_core.mesh.spec import parse_layout, parse_layouts


@pytest.mark.parametrize(
    ("text", "engine", "sizes", "stage"),
    [
        ("single", "single", {}, None),
        ("dp4", "ddp", {"dp_replicate": 4}, None),
        ("fsdp2", "fsdp", {"dp_shard": 2}, None),
        ("fsdp1", "fsdp", {"dp_shard": 1}, None),
        ("hsdp2x4", "fsdp", {"dp_replicate": 2, "dp_shard": 4}, None),
        ("dp2xfsdp4", "fsdp", {"dp_replicate": 2, "dp_shard": 4}, None),
        ("tp2", "mesh", {"tp": 2}, None),
        ("cp2", "mesh", {"cp": 2}, None),
        ("dp2xtp4", "mesh", {"dp_replicate": 2, "tp": 4}, None),
        (" FSDP2 x TP2 ", "fsdp", {"dp_shard": 2, "tp": 2}, None),
        ("tp2xfsdp2xcp4", "fsdp", {"dp_shard": 2, "cp": 4, "tp": 2}, None),
        ("zero3", "deepspeed", {"dp_replicate": 2}, 3),
        ("zero1x8", "deepspeed", {"dp_replicate": 8}, 1),
        ("zero2x2xsp2", "deepspeed", {"dp_replicate": 2, "sp": 2}, 2),
    ],
)
def test_a_layout_is_read(text: str, engine: str, sizes: dict[str, int], stage: int | None) -> None:
    """A layout has the engine, the sizes in the order of the mesh, and the stage that were written."""
    spec = parse_layout(text)
    assert (spec.engine, dict(spec.sizes), spec.zero_stage) == (engine, sizes, stage)
    assert spec.name == text.lower().replace(" ", "")
    last = spec.ranks - 1
    assert spec.layout(last) == Layout.of(last, spec.ranks, sizes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fdsp2", "got 'fdsp2' in 'fdsp2'. Did you mean 'fsdp'"),
        ("ddp4", "got 'ddp4' in 'ddp4'. Did you mean 'dp'"),
        ("fsdp2+tp2", r"got 'fsdp2\+tp2'"),
        ("", "got '' in ''"),
        ("2xtp2", "got '2' in '2xtp2'"),
        (
            "fsdp",
            r"'fsdp' is followed by 1 numbers of 1 or more, .*; got \[\] in 'fsdp'. Write for example single, dp4",
        ),
        ("hsdp4", r"'hsdp' is followed by 2 numbers .*; got \[4\]"),
        ("tp2x2", r"'tp' is followed by 1 numbers .*; got \[2, 2\]"),
        ("single2", "'single' is followed by 0 numbers"),
        ("tp0", r"'tp' .*; got \[0\]"),
        ("hsdp2x2xfsdp2", "got dp_shard twice"),
        ("zero4", "stages 1, 2 and 3; got 4"),
        ("zero3x2xtp2", "ZeRO combines with sp, and sp with ZeRO alone; got 'zero3x2xtp2'"),
        ("sp2", "sp with ZeRO alone; got 'sp2'"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, said: str) -> None:
    """A contradictory layout is refused by what is wrong with it."""
    with pytest.raises(ConfigurationError, match=said):
        parse_layout(text)


def test_layouts_are_separated_by_commas() -> None:
    """Several layouts keep their order; none at all is refused."""
    assert [spec.name for spec in parse_layouts("fsdp2, zero3,tp2", zero_ranks=4)] == ["fsdp2", "zero3", "tp2"]
    assert [spec.ranks for spec in parse_layouts(["fsdp2,dp8", "zero3"], zero_ranks=4)] == [2, 8, 4]
    with pytest.raises(ConfigurationError, match="got ' , '"):
        parse_layouts(" , ")
