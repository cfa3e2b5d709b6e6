"""Where a row is measured, and what every row needs there."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MIB, GIB = 2**20, 2**30
SIMULATED = Path(__file__).resolve().parents[2] / "tests-integration" / "simulated_device"
SIMULATED_BYTES = 256 * MIB
Figures = dict[str, "float | str"]


class NotHere(Exception):
    """A row cannot be measured on this machine, for the reason that the message gives."""


class Differs(Exception):
    """What was checked is not so."""


def check(holds: object, what: str) -> None:
    """Raise `Differs` with the words of what was expected unless it holds."""
    if not holds:
        raise Differs(what)


@dataclass(frozen=True)
class Line:
    """A line of the table: its words, which figure it shows, in which unit, and beside which other figure."""

    words: str
    key: str
    unit: str = ""
    limit: str | None = None
    reach: str = ""


@dataclass(frozen=True)
class Row:
    """Figures that are measured together, in one process.

    Attributes:
        run: What measures them.
        lines: How the table shows them.
        seconds: The most that it may take.
        peer: Whether accelerate 1.15.0 does the same beside it.
        dry: Where a dry run tries it: on the simulated accelerator, or on the CPU where that lacks what the row needs.
    """

    run: Callable[[Place], Figures]
    lines: tuple[Line, ...]
    seconds: int = 40
    peer: bool = False
    dry: str = "simulated"

    @property
    def name(self) -> str:
        """The name by which a row is chosen."""
        return self.run.__name__


@dataclass(frozen=True)
class Place:
    """The device that a row is measured on, and the library.

    Attributes:
        library: `accel`, or `accelerate` for the peer.
        device: The device.
        dry: Whether this is a dry run, in which everything is small and no figure means anything.
        folder: An empty folder.
    """

    library: str
    device: torch.device
    dry: bool
    folder: Path

    @classmethod
    def take(cls, library: str, dry: str | None, folder: Path) -> Place:
        """Set up the device of this process: CUDA's first, or in a dry run "simulated" or "cpu"."""
        if dry is None:
            device = torch.device("cuda", 0)
            torch.cuda.set_device(device)
        elif dry == "cpu":
            device = torch.device("cpu")
            os.environ["ACCELERATE_USE_CPU"] = "true"
        else:
            sys.path.insert(0, str(SIMULATED))
            import simulated

            simulated.set_up(1, SIMULATED_BYTES)
            if library == "accel":
                simulated.make_known()
            device = torch.device(simulated.NAME, 0)
            os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
        return cls(library, device, dry is not None, folder)

    @property
    def module(self) -> Any:
        """Torch's module of the device."""
        return torch.get_device_module(self.device)

    def size(self, real: int, dry: int) -> int:
        """Return a size for a GPU, or for a dry run."""
        return dry if self.dry else real

    def total(self) -> int:
        """Return the bytes that the device has."""
        return int(self.module.mem_get_info(self.device)[1])

    def limit(self, count: int) -> None:
        """Let this process have no more than so many bytes of the device."""
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(count / self.total(), self.device)
        else:
            self.module.native.set_limit(count)

    def used(self) -> int:
        """Return the bytes of living tensors on the device."""
        return int(self.module.memory_allocated(self.device))

    def peak(self, call: Callable[[], object]) -> int:
        """Return the most bytes of tensors that a call had on the device at once."""
        self.module.reset_peak_memory_stats(self.device)
        call()
        self.module.synchronize()
        return int(self.module.max_memory_allocated(self.device))

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds from an idle device until all that a call gave it is done."""
        self.module.synchronize()
        begun = time.perf_counter()
        call()
        self.module.synchronize()
        return time.perf_counter() - begun

    def medians(self, calls: dict[str, Callable[[], object]], rounds: int, most: float = 12.0) -> dict[str, float]:
        """Return the median seconds of calls that take turns, after one turn that does not count.

        Args:
            calls: The calls by name.
            rounds: Turns.
            most: Seconds after which no further turn begins.
        """
        for call in calls.values():
            call()
        taken: dict[str, list[float]] = {name: [] for name in calls}
        begun = time.perf_counter()
        for number in range(1 if self.dry else rounds):
            if number and time.perf_counter() - begun > most:
                break
            for name, call in calls.items():
                taken[name].append(self.seconds(call))
        return {name: statistics.median(times) for name, times in taken.items()}

    def accelerator(self, **settings: Any) -> Any:
        """Make an Accelerator of the library."""
        if self.library == "accel":
            from accel_core.accelerator import Accelerator
        else:
            from accelerate import Accelerator
        return Accelerator(**settings)

    def bigmodel(self) -> Any:
        """Return the module that has `cpu_offload` and `load_checkpoint_and_dispatch`."""
        if self.library == "accel":
            import accel_bigmodel as library
        else:
            import accelerate as library
        return library

    def pinned_rate(self) -> float:
        """Return the bytes per second at which pinned memory is copied to the device, median of several copies."""
        source = torch.empty(self.size(256 * MIB, MIB), dtype=torch.uint8).pin_memory()
        target = torch.empty_like(source, device=self.device)
        copies = 8

        def copy() -> None:
            for _ in range(copies):
                target.copy_(source, non_blocking=True)

        return copies * source.nbytes / self.medians({"copy": copy}, 5, 3.0)["copy"]
