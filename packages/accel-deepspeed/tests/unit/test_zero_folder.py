"""Whole weights from folders as DeepSpeed writes them, which need no DeepSpeed to be read."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_core.errors import CheckpointDamagedError, CheckpointMismatchError, UnsafeCheckpointError
from accel_deepspeed import zero_layout

pytest.importorskip("accel_parallel", reason="merges what lies in these folders")
from accel_parallel.checkpoint.merge import merge_weights

SHAPES: tuple[dict[str, tuple[int, ...]], ...] = (
    {"a.weight": (5, 3), "a.bias": (5,)},
    {"b.weight": (2, 7), "scale": ()},
)


def values() -> dict[str, torch.Tensor]:
    """Return what is trained."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for group in SHAPES for name, shape in group.items()}


def parts(ranks: int, stage: int, length: Callable[[int], int]) -> tuple[Mapping[str, Any], list[list[torch.Tensor]]]:
    """Return the layout of SHAPES, and each rank's part of each group."""
    lengths = [length(sum(math.prod(shape) for shape in group.values())) for group in SHAPES]
    if stage == 3:
        layout = zero_layout.of_parameters(SHAPES, ranks)
        lengths = [sum(zero_layout.part_of(math.prod(shape), ranks) for shape in group.values()) for group in SHAPES]
    else:
        layout = zero_layout.of_groups(SHAPES, lengths)
    flats = [[torch.zeros(each) for each in lengths] for _ in range(ranks)]
    for name, value in values().items():
        for each in layout[name]:
            flats[each.rank][each.group][each.offset : each.offset + each.size] = value.flatten()[
                each.begin : each.begin + each.size
            ]
    return layout, flats


def engine(folder: Path, stage: int, ranks: int = 3, step: int = 4) -> Path:
    """Write the files of an engine as each of some ranks does."""
    folder.mkdir(parents=True)
    _, flats = parts(ranks, stage, lambda total: -(-total // (2 * ranks)) * 2)
    sharded = stage == 3
    held = {name: torch.empty(0) if sharded else value.bfloat16() for name, value in values().items()}
    frozen = torch.arange(4.0)
    model = {
        "module": {**held, "tied.weight": held["a.weight"], "frozen": held["scale"], "mean": torch.ones(5)},
        "param_shapes": [{name: torch.Size(shape) for name, shape in group.items()} for group in SHAPES],
        "shared_params": {"tied.weight": "a.weight"},
        "frozen_param_shapes": {"frozen": torch.Size([4])},
        "frozen_param_fragments": {"frozen": frozen},
        "global_steps": step,
    }
    for rank in range(ranks):
        lean = [flat if sharded or rank < ranks - 1 else flat[: lean_length(flat, g, ranks)]
                for g, flat in enumerate(flats[rank])]  # fmt: skip
        content = {
            "zero_stage": stage,
            "partition_count": ranks if sharded else [ranks, ranks],
            "fp32_flat_groups" if sharded else "single_partition_of_fp32_groups": lean,
            "group_paddings": [len(flat) - len(short) for flat, short in zip(flats[rank], lean, strict=True)],
            "optimizer_state_dict" if sharded else "base_optimizer_state": {"state": {0: {"step": torch.tensor(step)}}},
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": content}, folder / f"{name}_optim_states.pt")
        if sharded:
            part = zero_layout.part_of(4, ranks)
            own = torch.cat([frozen, frozen.new_zeros(9)])[rank * part : (rank + 1) * part]
            torch.save({**model, "frozen_param_fragments": {"frozen": own}}, folder / f"{name}_model_states.pt")
    if not sharded:
        torch.save(model, folder / "mp_rank_00_model_states.pt")
    return folder


def lean_length(flat: torch.Tensor, group: int, ranks: int) -> int:
    """Return the length of the last rank's part without what pads it."""
    total = sum(math.prod(shape) for shape in SHAPES[group].values())
    return total - (ranks - 1) * len(flat)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_weights_are_put_together(tmp_path: Path, stage: int) -> None:
    """Trained weights come whole and in 32 bits from all ranks' parts; frozen ones, buffers and ties with them."""
    merge_weights(engine(tmp_path / "checkpoint" / "pytorch_model", stage).parent, tmp_path / "whole")
    found = load_file(tmp_path / "whole" / "model.safetensors")
    expected = {**values(), "frozen": torch.arange(4.0), "mean": torch.ones(5)}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    merge_weights(tmp_path / "checkpoint" / "pytorch_model", tmp_path / "plain", safe_serialization=False)
    stored = torch.load(tmp_path / "plain" / "pytorch_model.bin", weights_only=True)
    torch.testing.assert_close(stored["tied.weight"], expected["a.weight"], rtol=0, atol=0)


PART = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        (lambda folder: (folder / PART).unlink(), CheckpointDamagedError, "no part of rank 1"),
        (
            lambda folder: shutil.copy(folder / PART, folder / PART.replace("rank_1", "rank_7")),
            CheckpointDamagedError,
            "a part of rank 7, of 3",
        ),
        (lambda folder: os.truncate(folder / PART, 900), CheckpointDamagedError, PART),
        (
            lambda folder: shutil.copy(engine(folder.parent / "other" / "x", 3, step=5) / PART, folder),
            CheckpointDamagedError,
            "steps of the optimizer 4, 5",
        ),
        (
            lambda folder: shutil.copy(engine(folder.parent / "other" / "x", 3, ranks=2) / PART, folder),
            CheckpointDamagedError,
            "numbers of ranks 3, 2",
        ),
        (
            lambda folder: (folder / "mp_rank_01_model_states.pt").touch(),
            CheckpointMismatchError,
            "got parts of mp_rank_01_model_states.pt in",
        ),
        (
            lambda folder: (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(),
            CheckpointMismatchError,
            "got parts of layer_0_expert_1",
        ),
        (lambda folder: torch.save(os.getcwd, folder / PART), UnsafeCheckpointError, "would run code"),
        (
            lambda folder: engine(folder.parent / "pytorch_model_1", 2),
            CheckpointMismatchError,
            "got pytorch_model, pytorch_model_1 in",
        ),
        (
            lambda folder: (folder.parent / "model_1.safetensors").touch(),
            CheckpointMismatchError,
            "got model_1.safetensors, pytorch_model in",
        ),
    ],
)
def test_mixed_and_incomplete_folders_are_refused(
    tmp_path: Path, change: Callable[[Path], object], error: type[Exception], found: str
) -> None:
    """A missing, foreign or surplus part, other saves, layers in parts, code and several models: an error, no file."""
    folder = engine(tmp_path / "checkpoint" / "pytorch_model", 3)
    change(folder)
    with pytest.raises(error, match=found):
        merge_weights(folder.parent, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_value_lies_in_one_place(ranks: int) -> None:
    """In all stages, the stretches of a parameter follow one another, and no two values have one place."""
    for layout in (
        zero_layout.of_parameters(SHAPES, ranks),
        zero_layout.of_groups(SHAPES, [-(-20 // ranks), -(-15 // ranks)]),
        zero_layout.of_groups(SHAPES, [-(-30 // ranks)] * 2, [[3, 2], [1, 0]]),
    ):
        places: list[tuple[int, int, int]] = []
        for group in SHAPES:
            for name, shape in group.items():
                end = 0
                for each in layout[name]:
                    assert each.begin == end
                    end += each.size
                    places += [(each.rank, each.group, each.offset + index) for index in range(each.size)]
                assert end == math.prod(shape)
        assert len(set(places)) == len(places)
        assert {rank for rank, _, _ in places} <= set(range(ranks))
