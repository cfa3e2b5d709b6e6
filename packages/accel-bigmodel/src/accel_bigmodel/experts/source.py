"""Where the experts of a module are stored, and how one of them is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial

import torch

from accel_bigmodel.gguf.packed import GgufWeight
from accel_bigmodel.offload.index import MappedFile
from accel_bigmodel.offload.store import OffloadedWeightsLoader
from accel_bigmodel.placement import normal_tensors
from accel_core._records import record
from accel_core.errors import OffloadError


@record
class Brought:
    """The weights of an expert on the device that computes with it, and what it took to have them there."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    from_disk: int = 0
    from_host: int = 0
    in_pages: bool = True  # whether the weights are the file's own pages, not copies of them
    pages: list[Callable[[], None]] = field(default_factory=list)  # what lets each page go

    def release(self) -> None:
        """Let pages go."""
        while self.pages:
            self.pages.pop()()


@record
class Part:
    """A tensor with a part of a module's experts, or of one of them.

    Attributes:
        name: Its name in the module.
        store: Where it is stored.
        key: Its name there.
        dtype: What it is computed in; None for the one that it is stored in.
        shape: The shape that it has to have; None for any.
        weight: The weight that its bytes are made into, of a packed one.
    """

    name: str
    store: Mapping[str, torch.Tensor]
    key: str
    dtype: torch.dtype | None = None
    shape: Sequence[int] | None = None
    weight: GgufWeight | None = None

    @property
    def place(self) -> tuple[MappedFile, str] | None:
        """The file that it lies in, and its name there; None for one in memory."""
        return self.store.file_of(self.key) if isinstance(self.store, OffloadedWeightsLoader) else None

    @property
    def stored(self) -> torch.Tensor:
        """The tensor in memory."""
        return self.store[self.key]

    def state(self) -> tuple[object, ...]:
        """Return what changes when it was replaced or written to."""
        place = self.place
        if place is None:
            stored = self.stored
            return stored, self.dtype, None if stored.is_inference() else stored._version
        place[0].check()
        return place, self.dtype, place[0].writes(place[1])

    def bring(self, row: int | None, device: torch.device | None, found: Brought) -> torch.Tensor:
        """Return it, or one of its rows, on a device."""
        place = self.place
        shape = self.stored.shape if place is None else place[0].entries[place[1]].shape
        if self.shape is not None and shape != self.shape:
            raise OffloadError(
                f"An offloaded weight does not have the shape of its parameter; got {tuple(shape)} for "
                f"{self.key!r}, which has {tuple(self.shape)}. Put a weight of that shape into the weights map."
            )
        if place is None:
            source = self.stored if row is None else self.stored[row : row + 1]
            found.from_host += source.nbytes
        else:
            file, name = place
            file.will_need(name, row)
            source = file.tensor(name) if row is None else file.row(name, row)
            found.from_disk += source.nbytes
            if not file.writes(name):  # what was written to the map lies in these pages alone
                found.pages.append(partial(file.done_with, name, row))
        dtype = self.dtype or source.dtype
        if place is not None and source.device == device and source.dtype == dtype:
            return source
        found.in_pages = False
        return source.to(device, dtype, copy=True)


class ExpertSource(ABC):
    """Where the weights of one module's experts come from.

    Attributes:
        name: The module's name.
        count: How many experts it has.
    """

    name: str
    count: int

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Whether `read` waits until the weights are there; otherwise it asks for them, and computing waits."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of one expert on its device."""

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return the tensors that its experts are stored in."""

    @abstractmethod
    def made(self, number: int, part: Part, found: Brought) -> torch.Tensor:
        """Return a weight of an expert, as it computes with it.

        Args:
            number: The expert.
            part: The weight.
            found: Notes what was read for it.
        """

    def state(self) -> tuple[object, ...]:
        """Return objects that are the same ones as long as weights that were read would be read again."""
        return tuple(each for part in self.parts() for each in part.state())

    def read(self, number: int) -> Brought:
        """Return an expert's weights on the device that computes: pages of the file where that is the CPU.

        Args:
            number: The expert.
        """
        found = Brought()
        with normal_tensors():
            for part in self.parts():
                found.weights[part.name] = self.made(number, part, found)
        if not found.in_pages:
            found.release()
        return found
