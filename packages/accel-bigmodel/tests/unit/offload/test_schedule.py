"""The production schedule under a transport with a virtual clock: overlap, budget, and any order of completion."""

import functools
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_bigmodel.offload.schedule import Block, BlockState, Schedule


@dataclass
class Bus:
    """A transport over one bus: transfers run one after the other, beside the computation, on a virtual clock."""

    now: float = 0.0
    free_at: float = 0.0
    events: list[tuple[str, str, float]] = field(default_factory=list)
    held: int = 0
    peak: int = 0

    def start(self, block: Block[str]) -> float:
        """Queue the transfer behind the others."""
        self.events.append(("issue", block.name, self.now))
        self.held += block.nbytes
        self.peak = max(self.peak, self.held)
        self.free_at = max(self.free_at, self.now) + block.nbytes
        return self.free_at

    def finish(self, block: Block[str], ticket: float) -> str:
        """Let time pass until it is done."""
        self.now = max(self.now, ticket)
        self.events.append(("ready", block.name, self.now))
        return block.name

    def cancel(self, block: Block[str], ticket: float) -> None:
        """Free its memory."""
        self.events.append(("cancel", block.name, self.now))
        self.held -= block.nbytes

    def discard(self, block: Block[str], content: str) -> None:
        """Free its memory."""
        assert content == block.name
        self.events.append(("free", block.name, self.now))
        self.held -= block.nbytes


def run(schedule: Schedule[str], bus: Bus, blocks: list[Block[str]], compute: list[float]) -> float:
    """Run a forward pass and return its virtual seconds."""
    begin = bus.now
    for block, seconds in zip(blocks, compute, strict=True):
        schedule.acquire(block)
        bus.events.append(("compute", block.name, bus.now))
        bus.now += seconds
        bus.events.append(("computed", block.name, bus.now))
        schedule.release(block)
    schedule.end_pass()
    return bus.now - begin


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10), min_size=2, max_size=12),
    compute=st.integers(1, 10),
    windows=st.sampled_from([2, 3, 5]),
)
def test_the_next_transfer_overlaps_and_the_budget_holds(sizes: list[int], compute: int, windows: int) -> None:
    """From the second pass on, transfer i+1 is issued before compute i ends, and bytes never exceed the budget.

    With room for all blocks, the pass takes no longer than the order of the blocks makes it.
    """
    bus = Bus()
    blocks = [Block[str](str(number), size) for number, size in enumerate(sizes)]
    budget = windows * max(sizes)
    schedule = Schedule(bus, budget)
    run(schedule, bus, blocks, [compute] * len(blocks))
    assert all(block.state is BlockState.OFFLOADED for block in blocks)
    bus.events.clear()
    seconds = run(schedule, bus, blocks, [compute] * len(blocks))
    when = {(kind, name): time for kind, name, time in bus.events}
    for number in range(len(blocks) - 1):
        assert when["issue", str(number + 1)] <= when["computed", str(number)]
        assert bus.events.index(("issue", str(number + 1), when["issue", str(number + 1)])) < bus.events.index(
            ("computed", str(number), when["computed", str(number)])
        )
    assert bus.peak <= budget
    assert bus.held == schedule.held == 0
    assert seconds <= sum(sizes) + compute * len(sizes)
    bus.now, bus.free_at = 0.0, 0.0
    schedule.budget = sum(sizes)
    # Two machines in a row: what comes before some block travels, what comes after it computes, and neither can hide.
    least = max(sum(sizes[: k + 1]) + compute * (len(sizes) - k) for k in range(len(sizes)))
    assert run(schedule, bus, blocks, [compute] * len(blocks)) == least


@pytest.mark.parametrize(
    ("guess", "seconds", "sent"),
    [
        ((), 10 * 4 + 10 * 4, 10),
        (range(10), 10 * 4 + 4, 10),
        ((9, *range(9)), 10 * 4 + 2 * 4, 10),  # a head that is registered first
        ((0, 10, *range(1, 10)), 10 * 4 + 2 * 4, 11),  # a block that does not run
        (range(9, -1, -1), 10 * 4 + 10 * 4, 10),
    ],
)
def test_the_first_pass_follows_a_guess(guess: list[int], seconds: int, sent: int) -> None:
    """Right or wrong, each block has its weights, and the second pass follows what was recorded."""
    bus = Bus()
    blocks = [Block[str](str(number), 4) for number in range(11)]
    schedule = Schedule(bus, 3 * 4, guess=[blocks[number] for number in guess])
    assert run(schedule, bus, blocks[:10], [4.0] * 10) == seconds
    assert sum(kind == "issue" for kind, _, _ in bus.events) == sent
    assert [block.name for block in schedule.order] == [str(number) for number in range(10)]
    assert run(schedule, bus, blocks[:10], [4.0] * 10) == 10 * 4 + 4


def test_without_a_budget_everything_is_synchronous() -> None:
    """The oracle: each transfer is issued when its block is needed, and time adds up."""
    bus = Bus()
    blocks = [Block[str](str(number), 2) for number in range(4)]
    schedule = Schedule(bus, None)
    for _ in range(2):
        assert run(schedule, bus, blocks, [3.0] * 4) == 4 * 2 + 4 * 3
    assert bus.peak == 2


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=6),
    st.integers(1, 30),
    st.lists(st.integers(0, 5), unique=True),
)
def test_any_order_of_blocks_is_served(passes: list[list[int]], budget: int, guess: list[int]) -> None:
    """Experts that come in another order each time, skipped and repeated blocks: always the right weights."""
    bus = Bus()
    blocks = [Block[str](str(number), number + 1) for number in range(6)]
    schedule = Schedule(bus, budget, guess=[blocks[number] for number in guess])
    for order in passes:
        for number in order:
            assert schedule.acquire(blocks[number]) == str(number)
            assert bus.held <= max(budget, number + 1)
            schedule.release(blocks[number])
        schedule.end_pass()
        assert bus.held == schedule.held == 0


def test_a_block_that_is_there_is_not_sent_for_again() -> None:
    """It is sent for once and freed once, however often it is asked for and released."""
    bus = Bus()
    block = Block[str]("a", 1)
    schedule = Schedule(bus, 4)
    for _ in range(2):
        schedule.acquire(block)
        assert block.state is BlockState.RESIDENT
    for _ in range(2):
        schedule.release(block)
        assert block.state is BlockState.OFFLOADED
    assert [kind for kind, *_ in bus.events] == ["issue", "ready", "free"]


def test_running_out_of_memory_ahead_lowers_the_budget() -> None:
    """When the device is full, what was sent ahead is taken back and the block that computes is loaded."""

    class Small(Bus):
        capacity = 5

        def start(self, block: Block[str]) -> float:
            if self.held + block.nbytes > self.capacity:
                raise torch.OutOfMemoryError("full")
            return super().start(block)

    bus = Small()
    blocks = [Block[str](str(number), 2) for number in range(5)]
    schedule = Schedule(bus, 100)
    for _ in range(3):
        run(schedule, bus, blocks, [1.0] * 5)
    assert bus.peak <= 5
    assert schedule.budget is not None
    assert schedule.budget <= 5
    bus.capacity = 1
    with pytest.raises(torch.OutOfMemoryError):
        schedule.acquire(blocks[0])
    assert schedule.held == 0


def test_an_arrived_block_is_released_before_it_is_resent() -> None:
    """A block half of which came before memory ran out finds that half free when it is tried again."""
    arrived: list[weakref.ref[torch.Tensor]] = []

    class Half(Bus):
        full = True

        def finish(self, block: Block[str], ticket: float) -> str:
            if block.name == "big" and self.full:
                self.full, half = False, torch.zeros(1)
                arrived.append(weakref.ref(half))
                self.held -= block.nbytes
                raise torch.OutOfMemoryError("full")
            return super().finish(block, ticket)

        def start(self, block: Block[str]) -> float:
            assert all(reference() is None for reference in arrived), "the failed attempt still holds its half"
            return super().start(block)

    bus = Half()
    small, big, other = Block[str]("small", 1), Block[str]("big", 2), Block[str]("other", 1)
    schedule = Schedule(bus, 10)
    schedule.order = [small, other, big]
    schedule.acquire(small)
    assert other.state is BlockState.LOADING
    schedule.forget(big)  # so that it is sent for when it is needed, with another one under way
    assert schedule.acquire(big) == "big"
    assert len(arrived) == 1


class Shuffled:
    """A transport whose transfers complete in a random order, and whose buffers are garbage until they do."""

    def __init__(self, draw: random.Random, weights: dict[str, torch.Tensor]) -> None:
        self.draw = draw
        self.weights = weights
        self.flying: dict[str, torch.Tensor] = {}

    def _complete_some(self, wanted: str | None = None) -> None:
        for name in self.draw.sample(sorted(self.flying), len(self.flying)):
            if name == wanted or self.draw.random() < 0.5:
                self.flying.pop(name).copy_(self.weights[name])

    def start(self, block: Block[torch.Tensor]) -> torch.Tensor:
        """Hand out a buffer that is filled later."""
        self._complete_some()
        buffer = torch.full_like(self.weights[block.name], float("nan"))
        self.flying[block.name] = buffer
        return buffer

    def finish(self, block: Block[torch.Tensor], ticket: torch.Tensor) -> torch.Tensor:
        """Complete at least this one."""
        self._complete_some(block.name)
        return ticket

    def cancel(self, block: Block[torch.Tensor], ticket: torch.Tensor) -> None:
        """Complete or forget it."""
        self.flying.pop(block.name, None)

    def discard(self, block: Block[torch.Tensor], content: torch.Tensor) -> None:
        """Spoil the memory, as its next user would."""
        assert block.name not in self.flying
        content.fill_(float("nan"))


@pytest.mark.parametrize("seed", range(0, 300, 30))
def test_outputs_are_bit_equal_under_random_completion_orders(seed: int) -> None:
    """Thirty interleavings each, three hundred in all: the outputs are those of the weights in memory."""
    for number in range(seed, seed + 30):
        draw = random.Random(number)
        torch.manual_seed(number)
        weights = {str(n): torch.randn(4, 4) for n in range(draw.randint(2, 7))}
        blocks = {name: Block[torch.Tensor](name, 64) for name in weights}
        order = [draw.choice(sorted(weights)) for _ in range(draw.randint(2, 10))]
        schedule = Schedule(Shuffled(draw, weights), 64 * draw.randint(1, 4))
        for _ in range(3):
            x = expected = torch.eye(4)
            for name in order:
                weight = schedule.acquire(blocks[name])
                x = torch.tanh(x @ weight)
                expected = torch.tanh(expected @ weights[name])
                schedule.release(blocks[name])
            schedule.end_pass()
            assert torch.equal(x, expected)


@dataclass
class Failing(Bus):
    """A bus one of whose steps fails as often as it is told to."""

    fails: str = ""
    times: int = 0

    def _step(self, name: str) -> None:
        if self.fails == name and self.times:
            self.times -= 1
            raise OSError(f"no {name}")

    def start(self, block: Block[str]) -> float:
        """Queue the transfer, or fail."""
        self._step("start")
        return super().start(block)

    def finish(self, block: Block[str], ticket: float) -> str:
        """Wait for it; a transfer that fails holds nothing."""
        try:
            self._step("finish")
        except OSError:
            self.held -= block.nbytes
            raise
        return super().finish(block, ticket)

    def cancel(self, block: Block[str], ticket: float) -> None:
        """Free its memory, and fail after that."""
        super().cancel(block, ticket)
        self._step("cancel")

    def discard(self, block: Block[str], content: str) -> None:
        """Free its memory, and fail after that."""
        super().discard(block, content)
        self._step("discard")


def test_a_cancellation_that_fails_leaves_a_clean_schedule() -> None:
    """A transfer that fails while it is taken back raises, and counts as held no more."""
    bus = Failing(fails="cancel", times=1)
    blocks = [Block[str](str(number), 2) for number in range(2)]
    schedule = Schedule(bus, 4)
    for block in blocks:
        schedule.acquire(block)
        schedule.release(block)
    schedule.position = 0
    schedule.acquire(blocks[0])
    schedule.release(blocks[0])
    assert blocks[1].state is BlockState.LOADING
    with pytest.raises(OSError, match="no cancel"):
        schedule.end_pass()
    assert (schedule.held, blocks[1].state) == (0, BlockState.OFFLOADED)


@pytest.mark.slow
@given(
    fails=st.sampled_from(["start", "finish", "cancel", "discard"]), at=st.integers(0, 20), times=st.integers(1, 3),
    budget=st.sampled_from([4, 8, 100]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_transport_that_fails_leaves_every_block_usable(fails: str, at: int, times: int, budget: int) -> None:
    """Whichever step fails, the error reaches the caller as it is, nothing stays held, and the next pass is right."""
    bus = Failing()
    blocks = [Block[str](str(number), 3) for number in range(5)]
    schedule = Schedule(bus, budget)
    run(schedule, bus, blocks, [1.0] * 5)
    errors: list[str] = []

    def attempt(step: Callable[[], object]) -> bool:
        try:
            step()
        except OSError as failure:
            errors.append(str(failure))
            return False
        return True

    for failing in (False, True, False):
        bus.fails, bus.times = (fails, times) if failing else ("", 0)
        for block in blocks[at % 5 if failing else 0 :]:
            if attempt(functools.partial(schedule.acquire, block)):
                attempt(functools.partial(schedule.release, block))
        while not attempt(schedule.end_pass):
            pass
        assert all(block.state is BlockState.OFFLOADED for block in blocks)
        assert bus.held == schedule.held == 0
    assert set(errors) <= {f"no {fails}"}
    assert errors or fails == "cancel"  # a pass that comes to its end takes nothing back
    bus.fails = ""
    run(schedule, bus, blocks, [1.0] * 5)
    assert bus.held == schedule.held == 0


def test_a_failed_prefetch_raises_at_its_own_block() -> None:
    """The block before it computes; the error comes where it would come without prefetching."""
    bus = Failing()
    first, second = Block[str]("a", 1), Block[str]("b", 1)
    schedule = Schedule(bus, 10)
    run(schedule, bus, [first, second], [1.0, 1.0])

    class OnlyFirst(Failing):
        def start(self, block: Block[str]) -> float:
            if block is second:
                raise OSError("the file of b is gone")
            return super().start(block)

    schedule.transport = OnlyFirst()
    assert schedule.acquire(first) == "a"
    schedule.release(first)
    with pytest.raises(OSError, match="the file of b is gone"):
        schedule.acquire(second)
    schedule.end_pass()
    assert schedule.held == 0
