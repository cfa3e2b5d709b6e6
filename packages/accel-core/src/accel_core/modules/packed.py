"""Parameters that hold packed weights: how a quantization library tells accel about its own.

A library registers one `PackedParameter` per parameter class. Placing, loading and offloading code asks `find` and
otherwise treats the parameter as opaque, so that no package needs to know a vendor's class.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class PackedParameter(Protocol):
    """What accel needs to know about one class of packed parameters.

    `parameter` is always an instance for which `matches` is true. It may be empty (on the meta device).
    """

    name: str
    """Name of the format, unique among the registered ones."""

    def matches(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter, full or empty, is of this format.

        Args:
            parameter: A parameter of a model.
        """

    def nbytes(self, parameter: torch.Tensor) -> int:
        """Count the bytes that the packed weights and their statistics occupy.

        Args:
            parameter: A parameter of this format.

        Returns:
            The number of bytes.
        """

    def move(self, parameter: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the same packed weights on another device; on meta, an empty parameter that keeps its class.

        Args:
            parameter: A parameter of this format.
            device: The device.
        """

    def pack(
        self, parameter: torch.Tensor, value: torch.Tensor, device: torch.device, statistics: torch.Tensor | None = None
    ) -> nn.Parameter:
        """Make a packed parameter out of a value.

        Args:
            parameter: The parameter in whose place the result goes; it carries the format's settings.
            value: Floating point weights that are yet to be packed, or packed weights.
            device: Where the result goes.
            statistics: With packed weights of 8 bits, the statistics (row scales) saved beside them.

        Returns:
            The parameter of this format.
        """

    def parts(self, parameter: torch.Tensor) -> Sequence[str]:
        """Name what `unpack` gives for a parameter, which may be empty: `""`, then the suffixes of its statistics.

        Args:
            parameter: A parameter of this format.

        Returns:
            The suffixes, in the order in which they are stored.
        """

    def unpack(self, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return what must be stored to rebuild the parameter: plain tensors by suffix, `""` for the weights.

        A part with suffix `SCB` of `layer.weight` is stored as `layer.SCB`.

        Args:
            parameter: A parameter of this format.
        """

    def rebuild(
        self, parameter: torch.Tensor, stored: Mapping[str, torch.Tensor], device: torch.device
    ) -> nn.Parameter:
        """Make the parameter out of what `unpack` gave.

        Args:
            parameter: The empty parameter in whose place the result goes.
            stored: The tensors, under the suffixes of `unpack`.
            device: Where the result goes.

        Returns:
            The parameter, equal bit for bit to the one that was unpacked.
        """


_formats: dict[str, PackedParameter] = {}


def register(form: PackedParameter) -> None:
    """Make a packed format known; a format of the same name is replaced."""
    _formats[form.name] = form


def unregister(name: str) -> None:
    """Forget a packed format."""
    _formats.pop(name, None)


def any_known() -> bool:
    """Return whether any packed format is registered; without one, `find` finds nothing."""
    return bool(_formats)


def find(parameter: torch.Tensor) -> PackedParameter | None:
    """Find the format of a parameter."""
    for form in _formats.values():
        if form.matches(parameter):
            return form
    return None
