"""Names of layouts: what they ask of the launcher, and names that are none."""

import pytest

from accel_core.errors import ConfigurationError
from accel_launch.commands.launch import launch_command_parser
from accel_launch.verify.layouts import EXAMPLES, layouts_named, parse_layout


@pytest.mark.parametrize(
    ("name", "ranks", "parts"),
    [
        ("dp2", 2, 2),
        ("fsdp4", 4, 4),
        ("hsdp2x3", 6, 6),
        ("tp2", 2, 1),
        ("cp4", 4, 1),
        ("fsdp2xtp2", 4, 2),
        ("hsdp2x2xtp2", 8, 4),
        ("dp2xfsdp2", 4, 4),
        ("zero3", 2, 2),
        ("zero1x4", 4, 4),
    ],
)
def test_a_name_says_how_many_ranks_read_how_many_parts(name: str, ranks: int, parts: int) -> None:
    """Ranks along tensor and context axes read the same part of the data."""
    layout = parse_layout(name)
    assert (layout.name, layout.ranks, layout.parts) == (name, ranks, parts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_launcher_takes_what_a_layout_asks_for(name: str) -> None:
    """Its flags are flags of `accel launch`, with the number of processes."""
    layout = parse_layout(name)
    assert launch_command_parser().parse_args([*layout.words, "train.py"]).num_processes == layout.ranks


def test_a_hybrid_mesh_is_asked_for_axis_by_axis() -> None:
    """Copies, shards and tensor parallel each have their flag."""
    args = launch_command_parser().parse_args([*parse_layout("hsdp2x3xtp2").words, "train.py"])
    assert (args.use_fsdp, args.use_parallelism_config, args.fsdp_version) == (True, True, "2")
    assert args.parallelism_config_dp_replicate_size == 2
    assert args.parallelism_config_dp_shard_size == 3
    assert args.parallelism_config_tp_size == 2


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("fdsp2", "fsdp2"),
        ("zero4", "zero3"),
        ("ddp2", "dp2"),
        ("tp1", "tp2"),
        ("fsdp2xfsdp2", "fsdp2"),
        ("hsdp2", "hsdp2x2"),
        ("pp2", "tp2"),
        ("2x2", "hsdp2x2"),
        ("everything", ""),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    """The message has what was written, what is known, and names like it."""
    with pytest.raises(ConfigurationError, match=f"got '{name}'") as caught:
        parse_layout(name)
    assert ("Did you mean" in str(caught.value)) is bool(near)
    assert near in str(caught.value).rpartition("got")[2]


def test_lists_that_are_empty_repeated_or_too_large_are_refused() -> None:
    """A list has each layout once, and none with more processes than there are."""
    assert [layout.name for layout in layouts_named(" dp2, tp2 ,", 2)] == ["dp2", "tp2"]
    with pytest.raises(ConfigurationError, match="There is no layout to verify; got ' , '"):
        layouts_named(" , ", 8)
    with pytest.raises(ConfigurationError, match="got dp2 twice"):
        layouts_named("dp2,tp2,dp2", 8)
    with pytest.raises(ConfigurationError, match="fsdp2xtp2 needs 4 processes, and this run may start 2"):
        layouts_named("dp2,fsdp2xtp2", 2)
