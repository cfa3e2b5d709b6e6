"""The bytes of living tensors, by purpose, while a program runs on tensors without memory."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from accel_core._records import record
from accel_plan._torch import TorchDispatchMode, tree_leaves

_GATHERED = "communication"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@record
class _Held:
    """A living piece of memory."""

    purpose: str
    nbytes: int
    storage: weakref.ReferenceType[torch.UntypedStorage]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors alive that operations make, and the most that there were at once.

    Every piece of memory counts once, however many tensors view it, from the operation that makes it until nothing
    refers to it any longer. What FSDP and process groups write to counts as "communication".

    Attributes:
        purpose: What memory made from now on is for.
        live: Bytes alive, by purpose.
        total: Bytes alive.
        peak: The most bytes that were alive at once.
        at_peak: What they were for.
        most: For each purpose, the most bytes of it that were alive at once.
    """

    def __init__(self, purpose: str, fake_mode: object = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.purpose = purpose
        self.live: Counter[str] = Counter()
        self.total = 0
        self._mode = fake_mode
        self._held: dict[int, _Held] = {}
        self._filled: set[int] = set()
        self.forget_peak()

    def forget_peak(self) -> None:
        """Restart the search for the peak."""
        self.peak = self.total
        self.at_peak = dict(self.live)
        self.most = dict(self.live)

    def note(self, tensors: Iterable[torch.Tensor], purpose: str) -> None:
        """Count tensors as alive, for a purpose; those that counted already are for this one from now on."""
        for tensor in tensors:
            held = self._hold(tensor.untyped_storage(), purpose)
            self.live[held.purpose] -= held.nbytes
            self.live[purpose] += held.nbytes
            held.purpose = purpose
        self._sample()

    def add(self, purpose: str, nbytes: int) -> None:
        """Count bytes that no tensor stands for, or fewer than tensors have."""
        self.live[purpose] += nbytes
        self.total += nbytes

    def purpose_of(self, tensor: torch.Tensor) -> str | None:
        """Return what a tensor's memory is for; `None` where it does not count."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        return None if held is None else held.purpose

    def _hold(self, storage: torch.UntypedStorage, purpose: str) -> _Held:
        key = storage._cdata
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(purpose, 0, weakref.ref(storage))  # counting keeps nothing alive
            weakref.finalize(storage, self._gone, key)
        self._measure(held, storage.nbytes())
        return held

    def _measure(self, held: _Held, nbytes: int) -> None:
        self.live[held.purpose] += nbytes - held.nbytes
        self.total += nbytes - held.nbytes
        held.nbytes = nbytes

    def _gone(self, key: int) -> None:
        self._measure(self._held.pop(key), 0)
        self._filled.discard(key)

    def _sample(self) -> None:
        """Record the bytes alive if they are a new peak."""
        for purpose, nbytes in self.live.items():
            if nbytes > self.most.get(purpose, 0):
                self.most[purpose] = nbytes
        if self.total >= self.peak:  # also where only a purpose became known
            self.peak, self.at_peak = self.total, dict(self.live)

    def _measure_freed(self) -> None:
        """Check whether memory that FSDP reuses was freed: no operation shows it."""
        for key in list(self._filled):
            held = self._held[key]
            storage = held.storage()
            if storage is not None and storage.nbytes() != held.nbytes:
                self._measure(held, storage.nbytes())
                self._filled.discard(key)

    def _counts(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and (
            self._mode is None or getattr(value, "fake_mode", None) is self._mode
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run an operation and count what it makes."""
        if any(kind not in _PLAIN and kind.__name__ != "FakeTensor" for kind in types):
            return NotImplemented  # a tensor made of others: its own operations on those come here
        kwargs = kwargs or {}
        if self._filled:
            self._measure_freed()
        namespace, name = func.namespace, str(func)
        if namespace == "_c10d_functional" and "wait_tensor" in name:
            return args[0]  # its fake version makes a new tensor, and the real one does not
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if self._counts(tensor):
                self._hold(tensor.untyped_storage(), self.purpose)
        if namespace in ("fsdp", "c10d"):
            self._note_traffic(name, args, kwargs)
        self._sample()
        return result

    def _note_traffic(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the memory through which parameters and gradients are communicated."""
        found = [tensor for tensor in tree_leaves((args, kwargs)) if self._counts(tensor)]
        self.note(
            [tensor for tensor in found if self.purpose_of(tensor) in (None, "activations", "workspace")], _GATHERED
        )
        if "split_with_sizes_copy" in name:
            self._filled |= {tensor.untyped_storage()._cdata for tensor in kwargs.get("out", ())}
