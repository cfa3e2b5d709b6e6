"""N ranks × accumulation × a short last window = one process on the big batch."""

from __future__ import annotations

import pytest
from training import close, plain, with_accel, with_weights

from accel_core.optim.accumulation import Accumulation
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.process.world import ensure
from accel_testing import world
from accel_testing.world import run

CASES = [(accumulation, batches) for accumulation in (1, 2, 3) for batches in (1, 4, 5, 6)]


def _equals_one_process(
    ranks: int, accumulation: int, batches: int, *, divided_by: str = "actual", **data: object
) -> None:
    batch = 2
    count = ranks * batch * batches
    ours = with_accel(count, batch * ranks if data.get("split_batches") else batch, accumulation, 2, **data)
    close(ours, plain(count, ranks * batch * accumulation, 2, short_window=divided_by))


@pytest.mark.parametrize(
    ("ranks", "accumulation", "batches"), [*((ranks, *case) for ranks in (1, 2) for case in CASES), (4, 3, 4)]
)
def test_ranks_train_as_one_process(ranks: int, accumulation: int, batches: int) -> None:
    """One rank, two and four with accumulation train as plain PyTorch does on the big batch."""
    world(ranks)(_equals_one_process)(ranks, accumulation, batches)


def _full_windows(ranks: int) -> None:
    """Divide a short window by the full length, as the plugin says and as the process's default says."""
    _equals_one_process(ranks, 3, 4, divided_by="full", short_window="full")
    GradientAccumulationPlugin.default_short_window = "full"
    try:
        _equals_one_process(ranks, 3, 4, divided_by="full")
        _equals_one_process(ranks, 3, 4, short_window="actual")
    finally:
        GradientAccumulationPlugin.default_short_window = "actual"


@pytest.mark.parametrize("ranks", [1, 2])
def test_short_windows_divided_in_full(ranks: int) -> None:
    """With short_window="full" every loss counts one part of a full window, as in plain PyTorch on one process."""
    world(ranks)(_full_windows)(ranks)


@pytest.mark.parametrize("data", [{"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}])
@world(2)
def test_every_way_of_reading(data: dict[str, object]) -> None:
    """However the data is shared out, the gradients are the same."""
    _equals_one_process(2, 2, 5, **data)


@world(2)
def test_evaluation_inside_an_epoch_changes_nothing() -> None:
    """Evaluation loops, whole and broken off, leave the synchronization of gradients alone."""
    _equals_one_process(2, 3, 5, evaluate=True)


COUNTS = [[[3, 0, 5], [1, 4, 0]], [[0, 0], [2, 7]], [[6], [1]], [[0, 2, 0, 3], [5, 0, 0, 1]]]


@pytest.mark.parametrize("counts", COUNTS)
@world(2)
def test_weighted_loss_is_that_of_one_big_batch(counts: list[list[int]]) -> None:
    """Any number of units in any batch of any rank, none included, gives the gradient of their common mean."""
    from torch.nn.functional import cross_entropy
    from training import model, optimizer_of, samples

    here = ensure()
    ours = with_weights(counts, here.rank, here.size)
    net = model()
    x, y = samples(sum(map(sum, counts))).tensors
    cross_entropy(net(x), y).backward()
    optimizer_of(net).step()
    close(ours, dict(net.state_dict()))


def _wrong_divisor() -> None:
    Accumulation.divisor = property(lambda self: self.gradient_state.num_steps)  # type: ignore[assignment,method-assign]
    _equals_one_process(2, 3, 5)


def _no_last_synchronization() -> None:
    real = Accumulation.advance

    def never_at_the_end(self: Accumulation) -> bool:
        sync = real(self)
        loader = self.gradient_state.active_dataloader
        if sync and loader.end_of_dataloader and loader.end_of_dataloader is not None and self.step == 0:
            self.gradient_state._set_sync_gradients(False)
            return False
        return sync

    Accumulation.advance = never_at_the_end  # type: ignore[method-assign]
    _equals_one_process(2, 3, 5)


@pytest.mark.parametrize("breakage", [_wrong_divisor, _no_last_synchronization])
def test_suite_notices(breakage: object) -> None:
    """A wrong loss divisor, and a last window that is not synchronized, make the comparison fail."""
    with pytest.raises(pytest.fail.Exception, match="Tensor-likes are not close"):
        run(breakage, 2)  # type: ignore[arg-type]
