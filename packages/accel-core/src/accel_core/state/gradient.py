"""`GradientState`: where the step stands in its accumulation window and in its data."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sized
from typing import Any, ClassVar

from accel_core.host import heartbeat
from accel_core.host.run_card import card
from accel_core.plugins.accumulation import GradientAccumulationPlugin, ShortWindow


class _Reading:
    """An iteration of a loader.

    Attributes:
        loader: The loader, held weakly.
        served: Batches of the epoch that it gave.
        left_open: Whether the iteration was broken off.
        begun: When it began, in seconds of the monotonic clock, and how many batches of the epoch it left out.
    """

    __slots__ = ("begun", "left_open", "loader", "served")

    def __init__(self, loader: object) -> None:
        self.loader = weakref.ref(loader)  # an iteration that was broken off keeps no dataset alive
        self.served = 0
        self.left_open = False
        self.begun = time.monotonic(), 0

    def is_beside(self, loader: object) -> bool:
        """Return whether this is the iteration of another loader that is still there."""
        own = self.loader()
        return own is not None and own is not loader


class GradientState:
    """Where the step stands: whether gradients are synchronized, and which loaders are being read.

    Every instance shares one state. Loaders enter when their iteration begins, report every batch, and leave when it
    ends. One that is broken off stays, with what is known of its last batch, until another batch is given or another
    iteration begins: code after a `break`, or after `next(iter(loader))`, still works on that batch. Training asks for
    the loader that feeds it, which an evaluation loop inside the epoch does not become.

    Args:
        gradient_accumulation_plugin: How gradients are accumulated.

    Attributes:
        sync_gradients (bool): Whether the current step synchronizes gradients and moves the optimizer.
        plugin_kwargs (dict): What the plugin says that differs from its defaults; read at every step.
        adjust_scheduler (bool): False: a schedule moves when the optimizer steps, whatever the plugin says.
        is_xla_gradients_synced (bool): Whether gradients were reduced across XLA devices since the last step.

    Examples:
        >>> state = GradientState()
        >>> [state.end_of_dataloader for batch in accelerator.prepare(loader)]
        [False, False, False, True]
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    adjust_scheduler: bool = False
    is_xla_gradients_synced: bool = False
    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    _readings: list[_Reading]
    _fresh: list[weakref.ref[Any]]
    _training: weakref.ref[Any] | None
    _latest: _Reading | None
    passes: int  # backward passes of the Accelerator before the first optimizer step; -1 after it
    awaits_step: bool  # gradients of losses with weights are complete, and no optimizer has stepped or cleared any
    extensions: list[Any]  # of the run, around its batches and its steps

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.__dict__.update(
                sync_gradients=True,
                plugin_kwargs={},
                _readings=[],
                _fresh=[],
                _training=None,
                _latest=None,
                extensions=[],
                awaits_step=False,
                passes=0,
            )
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def initialized(self) -> bool:
        """Whether the shared state is set."""
        return GradientState._shared_state != {}

    @property
    def num_steps(self) -> int:
        """Number of batches that make one optimizer step."""
        return int(self.plugin_kwargs.get("num_steps", 1))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of the data ends the accumulation window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Whether ranks synchronize gradients at every batch, to save memory at the price of speed."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def short_window(self) -> ShortWindow:
        """What losses of a window that the end of the data cuts short are divided by; see the plugin."""
        chosen: ShortWindow | None = self.plugin_kwargs.get("short_window")
        return GradientAccumulationPlugin.default_short_window if chosen is None else chosen

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders being read, outermost first, after a leading `None`."""
        return [None, *(loader for reading in self._readings if (loader := reading.loader()) is not None)]

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader being read, or `None`."""
        for reading in reversed(self._readings):
            loader = reading.loader()
            if loader is not None:
                return loader
        return None

    @property
    def in_dataloader(self) -> bool:
        """Whether any loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the innermost loader has given its last batch."""
        loader = self.active_dataloader
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Number of real samples in the innermost loader's last global batch, or -1 where that is not known."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: object) -> None:
        """Enter a loader whose iteration begins; a loader that is read again starts anew."""
        self._keep([each for each in self._readings if not each.left_open and each.is_beside(dataloader)])
        self._readings.append(_Reading(dataloader))
        self._report_loops()

    def _begin_at(self, dataloader: object, steps: int) -> None:
        """Note that the iteration that began continues after some batches of the epoch."""
        for reading in self._readings:
            if reading.loader() is dataloader:
                reading.served = steps
                reading.begun = reading.begun[0], steps

    def _advance(self, dataloader: object) -> None:
        """Note that `dataloader` gives a batch now."""
        heartbeat.beat()
        latest = self._latest
        # Called for every batch: while one loader gives batch after batch, nothing changes but a number.
        if latest is None or latest.loader() is not dataloader:
            latest = self._turn_to(dataloader)
        elif not self._fresh:
            self._fresh.append(latest.loader)
        latest.served += 1

    def _turn_to(self, dataloader: object) -> _Reading:
        """Note that `dataloader` gives batches from now on, and return its iteration."""
        self._keep([each for each in self._readings if not (each.left_open and each.is_beside(dataloader))])
        own = [each for each in self._readings if each.loader() is dataloader]
        self._latest = latest = own[0] if own else _Reading(dataloader)
        self._fresh = [ref for ref in self._fresh if ref() is not dataloader] + [latest.loader]
        return latest

    def _leave_open(self, dataloader: object) -> None:
        """Note that an iteration was broken off: what is known of its last batch stays until another one is given."""
        self._latest = None
        for reading in self._readings:
            if reading.loader() is dataloader:
                reading.left_open = True
                self._note_on_card(reading)
        self._report_loops()

    def _remove_dataloader(self, dataloader: object) -> None:
        """Let a loader go whose iteration ended."""
        for reading in self._readings:
            if reading.loader() is dataloader and not reading.left_open:
                self._note_on_card(reading)
        self._keep([each for each in self._readings if each.is_beside(dataloader)])
        self._report_loops()

    def _keep(self, readings: list[_Reading]) -> None:
        self._readings, self._latest = readings, None

    def _note_on_card(self, reading: _Reading) -> None:
        """Tell the launcher how fast an iteration was."""
        loader: Any = reading.loader()
        size = getattr(getattr(loader, "spec", None), "step_samples", None)
        if card.wanted and size:
            began, before = reading.begun
            remainder = loader.remainder if loader.end_of_dataloader else -1
            missing = size - remainder if remainder > 0 else 0
            card.epoch(loader, (reading.served - before) * size - missing, time.monotonic() - began)

    def _report_loops(self) -> None:
        heartbeat.loops(sum(not reading.left_open for reading in self._readings))

    def training_dataloader(self) -> Any:
        """Return the loader that feeds the step about to be taken, or `None`."""
        # The one that fed the previous step if it gave a batch since then, else the one that gave a batch last: so
        # neither an evaluation loop inside the epoch nor one broken off becomes the training loader.
        fresh = self._fresh
        # Called for every batch: the loader of the batch before is nearly always the only one that gave another.
        if fresh and (len(fresh) > 1 or fresh[0] is not self._training):
            there = [each for ref in fresh if (each := ref()) is not None]
            before = None if self._training is None else self._training()
            if there and not any(each is before for each in there):
                self._training = weakref.ref(there[-1])
        fresh.clear()
        loader = None if self._training is None else self._training()
        if loader is not None:
            for reading in self._readings:
                if reading.loader() is loader:
                    return loader
        return None

    def batches_left(self, dataloader: Sized) -> int | None:
        """Return how many batches `dataloader` still gives after the current one, or `None` where it has no length.

        Args:
            dataloader: A loader that is being read.

        Returns:
            The number, 0 at the last batch.
        """
        served = next((each.served for each in self._readings if each.loader() is dataloader), 0)
        try:
            return max(len(dataloader) - served, 0)
        except TypeError:
            return None

    def __reduce__(self) -> tuple[type[GradientState], tuple[()]]:
        # A copy, here or in another process, is the state of that process's step.
        return GradientState, ()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @classmethod
    def _reset_state(cls) -> None:
        """Empty the shared state."""
        cls._shared_state.clear()
