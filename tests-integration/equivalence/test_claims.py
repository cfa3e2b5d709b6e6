"""What the documentation says of runs of different sizes: when N processes equal one, and when they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_testing import world


def _train(file: str, samples: int, seedable: bool) -> None:
    """Train for two epochs with 8 samples in each step of the run, and keep the weights."""
    from accel_core.accelerator import Accelerator
    from accel_core.plugins.loading import DataLoaderConfiguration
    from accel_core.random import set_seed

    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(samples, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for values, sums in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(values), sums))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save(dict(accelerator.unwrap_model(model).state_dict()), file)
    accelerator.wait_for_everyone()


def _drawn(file: str, device_specific: bool) -> None:
    """Keep what every rank draws first behind the seed."""
    from accel_core.accelerator import Accelerator
    from accel_core.random import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(0, device_specific=device_specific)
    accelerator.save(accelerator.gather(torch.rand(1)), file)
    accelerator.wait_for_everyone()


def _result(file: Path, processes: int, work: Callable[..., None], *arguments: object) -> Any:
    world(processes)(work)(str(file), *arguments)
    return torch.load(file)


def test_a_run_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    """Under "Repeatable runs": two runs of two ranks that shuffle from the seed end with the same weights."""
    found = [_result(tmp_path / str(number), 2, _train, 43, False) for number in range(2)]
    assert torch.equal(found[0]["weight"], found[1]["weight"])


@pytest.mark.parametrize("device_specific", [False, True])
def test_a_seed_is_that_of_all_ranks_or_of_each(tmp_path: Path, device_specific: bool) -> None:
    """Under "Random numbers": `set_seed` gives all ranks the same numbers, and with `device_specific` their own."""
    one, other = _result(tmp_path / "drawn", 2, _drawn, device_specific)
    assert bool(one != other) is device_specific


@pytest.mark.parametrize("processes", [2, 8])
@pytest.mark.parametrize(
    ("samples", "seedable", "equal"), [(40, True, True), (40, False, False), (43, True, False)],
    ids=["full batches, order from seed and epoch", "order from the global generator", "an incomplete last batch"],
)  # fmt: skip
def test_split_batches_equal_one_process(
    tmp_path: Path, samples: int, seedable: bool, equal: bool, processes: int
) -> None:
    """Where concepts/processes.md says that they do, and neither of its two conditions can be left out."""
    found = [_result(tmp_path / str(count), count, _train, samples, seedable)["weight"] for count in (1, processes)]
    difference = float((found[0] - found[1]).abs().max())
    assert (difference < 1e-12) is equal, difference
