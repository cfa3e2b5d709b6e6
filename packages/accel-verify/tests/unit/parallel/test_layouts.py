"""Names of layouts: what they ask of the launcher, and names that are none."""

import pytest

from accel_core.errors import ConfigurationError
from accel_launch.commands.launch import launch_command_parser
from accel_testing import requires
from accel_verify.parallel.layouts import requested_layout, requested_layouts


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
        ("ep2", 2, 2),
        ("pp2", 2, 1),
        ("pp2xfsdp2", 4, 2),
        ("fsdp2xep2", 4, 4),
        ("ep2xtp2", 4, 2),
        ("zero3", 2, 2),
        ("zero1x4", 4, 4),
        ("zero2x2xsp2", 4, 2),
    ],
)
def test_a_name_says_how_many_ranks_read_how_many_parts(name: str, ranks: int, parts: int) -> None:
    """Ranks along tensor and context axes read the same part of the data."""
    layout = requested_layout(name)
    assert (layout.name, layout.ranks, layout.parts) == (name, ranks, parts)


@pytest.mark.parametrize(
    "name",
    [
        "dp2",
        pytest.param("fsdp2", marks=requires("engine:fsdp")),
        pytest.param("hsdp2x2", marks=requires("engine:fsdp")),
        pytest.param("tp2", marks=requires("engine:fsdp")),
        pytest.param("cp2", marks=requires("engine:fsdp")),
        pytest.param("fsdp2xtp2", marks=requires("engine:fsdp")),
        "ep2",
        "pp2",
        pytest.param("pp2xfsdp2", marks=requires("engine:fsdp")),
        pytest.param("fsdp2xep2", marks=requires("engine:fsdp")),
        pytest.param("fsdp2xcp2", marks=requires("engine:fsdp")),
        pytest.param("dp2xtp2", marks=requires("engine:fsdp")),
        pytest.param("cp2xtp2", marks=requires("engine:fsdp")),
        pytest.param("hsdp2x2xtp2", marks=requires("engine:fsdp")),
        pytest.param("zero3", marks=requires("engine:deepspeed")),
        pytest.param("zero2x4xsp2", marks=requires("engine:deepspeed")),
    ],
)
def test_the_launcher_takes_what_a_layout_asks_for(name: str) -> None:
    """Its flags are flags of `accel launch`, with the number of processes."""
    layout = requested_layout(name)
    assert launch_command_parser().parse_args([*layout.words, "train.py"]).num_processes == layout.ranks


@requires("engine:fsdp")
def test_a_hybrid_mesh_is_asked_for_axis_by_axis() -> None:
    """Copies, shards and tensor parallel each have their flag."""
    args = launch_command_parser().parse_args([*requested_layout("hsdp2x3xtp2").words, "train.py"])
    assert (args.use_fsdp, args.use_parallelism_config, args.fsdp_version) == (True, True, "2")
    assert args.parallelism_config_dp_replicate_size == 2
    assert args.parallelism_config_dp_shard_size == 3
    assert args.parallelism_config_tp_size == 2


@pytest.mark.parametrize("name", ["tp1", "single"])
def test_one_process_is_not_compared_with_itself(name: str) -> None:
    """A layout has several ranks."""
    with pytest.raises(ConfigurationError, match=f"needs at least 2 ranks; got '{name}'"):
        requested_layout(name)


def test_a_list_without_layouts_is_refused() -> None:
    """A list has a layout."""
    assert [layout.name for layout in requested_layouts(" dp2, tp2 ,")] == ["dp2", "tp2"]
    with pytest.raises(ConfigurationError, match="got ' , '"):
        requested_layouts(" , ")
