"""When which block is prefetched: the order of the first pass, and a window of bytes.

| state | what there is | moves |
|---|---|---|
| offloaded | nothing | sent for: loading |
| loading | a ticket; counted in `held` | finished: resident; failed or canceled: offloaded |
| resident | the weights; counted in `held` | released: offloaded |
"""

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

Content = TypeVar("Content")


class BlockState(enum.Enum):
    """Where the weights of a block are."""

    OFFLOADED = "offloaded"
    LOADING = "loading"
    RESIDENT = "resident"


class Block(Generic[Content]):
    """Weights that are moved together."""

    def __init__(self, name: str, nbytes: int, source: Any = None) -> None:
        self.name = name
        self.nbytes = nbytes
        self.source = source
        self.state = BlockState.OFFLOADED
        self.ticket: object = None
        self.content: Content | None = None


class Transport(Protocol[Content]):
    """What moves weights. Only `finish` may wait.

    For each block it is called in this order: `start`, then `finish` or `cancel`, and after a `finish` `discard`.
    """

    def start(self, block: Block[Content]) -> Any:
        """Begin to move a block's weights in.

        Args:
            block: The block.

        Returns:
            What `finish` or `cancel` will need.
        """

    def finish(self, block: Block[Content], ticket: Any) -> Content:
        """Wait until a block's weights can be computed with.

        Args:
            block: The block.
            ticket: What `start` gave.

        Returns:
            The weights.
        """

    def cancel(self, block: Block[Content], ticket: Any) -> None:
        """Abandon a transfer; its memory is free afterwards.

        Args:
            block: The block.
            ticket: What `start` gave.
        """

    def discard(self, block: Block[Content], content: Content) -> None:
        """Release a block's memory, after its computation was issued.

        Args:
            block: The block.
            content: What `finish` gave.
        """


class Schedule(Generic[Content]):
    """Moves blocks in time: while one computes, the next ones of the recorded order are prefetched.

    The first pass takes `guess` for that order, from each block on that comes.
    """

    def __init__(
        self,
        transport: Transport[Content],
        budget: int | None,
        has_room: Callable[[int], bool] | None = None,
        guess: Sequence[Block[Content]] = (),
    ) -> None:
        self._has_room = has_room
        self._guess = deque(guess)
        self.transport = transport
        self.budget = budget
        self.order: list[Block[Content]] = []
        self.position = 0
        self._ahead: list[Block[Content]] = []
        self._held = 0
        self._running = False
        self._lock = threading.RLock()

    @property
    def held(self) -> int:
        """Bytes that are loaded or in transfer."""
        return self._held

    def acquire(self, block: Block[Content]) -> Content:
        """Return a block's weights, and start the transfer of the next ones."""
        with self._lock:
            self._running = True
            self._advance(block)
            if block.state is not BlockState.RESIDENT:
                self._bring(block)
            content = block.content
            assert content is not None
            try:
                self._look_ahead()
            except BaseException:
                # The caller never gets the weights, so it will not release them.
                self.release(block)
                raise
            return content

    def release(self, block: Block[Content]) -> None:
        """Release a block's weights, if they are here; their memory is used for the next ones."""
        with self._lock:
            if block.state is BlockState.RESIDENT:
                self._evict(block)
                self._look_ahead()

    def end_pass(self) -> None:
        """Take back what was sent for and not used; the next block begins the order again."""
        with self._lock:
            self.cancel_ahead()
            self._guess.clear()
            self.position = 0
            # Blocks still in use are released after this, which must not send for weights of the next pass.
            self._running = False

    def forget(self, block: Block[Content]) -> None:
        """Leave a block out from now on: its weights come another way."""
        with self._lock:
            if block in self._ahead:
                self._cancel(block)
            self.order = [other for other in self.order if other is not block]
            self._guess = deque(other for other in self._guess if other is not block)
            self.position = min(self.position, len(self.order))

    def _advance(self, block: Block[Content]) -> None:
        """Follow the recorded order, or record."""
        order, at = self.order, self.position
        if at < len(order) and order[at] is block:
            self.position = at + 1
            return
        # Not the block that was expected: a branch was skipped (it is ahead), or a part runs again (it is behind).
        for start, stop in ((at, len(order)), (0, at)):
            for number in range(start, stop):
                if order[number] is block:
                    self.position = number + 1
                    return
        order.insert(at, block)
        self.position = at + 1
        while any(other is block for other in self._guess):  # what stands before it is left out, or comes later
            self._guess.popleft()

    def _bring(self, block: Block[Content]) -> None:
        """Have a block's weights now: wait for those under way, or send for them."""
        if block.state is BlockState.LOADING:
            self._ahead.remove(block)
            try:
                self._finish(block)
                return
            # The smaller window has transfers canceled below until this block fits.
            except torch.OutOfMemoryError:
                self._lower_budget()
        self._make_room(block)
        try:
            self._send(block)
            self._finish(block)
            return
        except torch.OutOfMemoryError:
            if not self._ahead:
                raise
        # The weights ahead are in the way of those needed now. Not in the handler: the frames of its failure hold what
        # had arrived of the block.
        self.cancel_ahead()
        self._lower_budget()
        self._send(block)
        self._finish(block)

    def _lower_budget(self) -> None:
        """The device is fuller than was thought: from now on no more than what is loaded anyway."""
        if self.budget is not None:
            self.budget = max(self._held, 1)

    def _make_room(self, block: Block[Content]) -> None:
        """Cancel transfers, the one needed last first, until a block that computes now fits."""
        while self._ahead and self.budget is not None and self._held + block.nbytes > self.budget:
            self._cancel(self._ahead[-1])

    def _send(self, block: Block[Content]) -> None:
        block.state = BlockState.LOADING
        # Counted before it starts: `_drop` takes it off again, however the transfer fails.
        self._held += block.nbytes
        try:
            block.ticket = self.transport.start(block)
        except BaseException:
            self._drop(block)
            raise

    def _finish(self, block: Block[Content]) -> None:
        try:
            block.content = self.transport.finish(block, block.ticket)
        except BaseException:
            self._drop(block)
            raise
        block.ticket = None
        block.state = BlockState.RESIDENT

    def cancel_ahead(self) -> None:
        """Cancel every transfer that nobody waits for."""
        for block in list(self._ahead):
            self._cancel(block)

    def _drop(self, block: Block[Content]) -> None:
        block.ticket = None
        block.state = BlockState.OFFLOADED
        self._held -= block.nbytes

    def _cancel(self, block: Block[Content]) -> None:
        self._ahead.remove(block)
        try:
            self.transport.cancel(block, block.ticket)
        finally:
            self._drop(block)

    def _evict(self, block: Block[Content]) -> None:
        content, block.content = block.content, None
        assert content is not None
        try:
            self.transport.discard(block, content)
        finally:
            # Nobody has the weights any longer, whatever the transport says: the block can be brought again.
            self._drop(block)

    def _look_ahead(self) -> None:
        """Send for the next blocks, as many as the budget allows."""
        if self.budget is None or not self._running:
            return
        for block in self._guess or self.order[self.position :]:
            if block.state is not BlockState.OFFLOADED:
                continue
            if self._held + block.nbytes > self.budget:
                return
            # What travels may not be in memory yet, so all of it counts again.
            traveling = sum(other.nbytes for other in self._ahead)
            if self._has_room is not None and not self._has_room(traveling + 2 * block.nbytes):
                return
            try:
                self._send(block)
            except torch.OutOfMemoryError:
                self._lower_budget()
                return
            except Exception:
                # The block that computes now is not to blame. This one is sent for again when its turn comes, and fails
                # there as it would without prefetching.
                return
            self._ahead.append(block)
