"""A file of a checkpoint, whatever its format."""

from collections.abc import Mapping
from typing import Protocol

import torch

from accel_bigmodel.offload.index import InFile
from accel_core.checkpoint.tensor_file import StoredTensor


class Shard(Protocol):
    """A file of a checkpoint, whose tensors are read when they are needed.

    Attributes:
        path: The file.
        entries: Its tensors, or what is known of them, by name.
    """

    path: str
    entries: Mapping[str, StoredTensor | torch.Tensor]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Args:
            name: Name of the tensor.

        Returns:
            The extents.
        """
        return tuple(self.entries[name].shape)

    def floating(self, name: str) -> bool:
        """Return whether a tensor holds floating point numbers.

        Args:
            name: Name of the tensor.

        Returns:
            False for integers, booleans and complex numbers.
        """
        return self.entries[name].dtype.is_floating_point

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor.

        Args:
            name: Name of the tensor.
        """

    def own(self, name: str) -> torch.Tensor:
        """Return a tensor whose memory no other tensor has that was returned.

        Args:
            name: Name of the tensor.

        Returns:
            The tensor.
        """
        return self.tensor(name)

    def in_file(self, name: str) -> InFile | None:
        """Return where a tensor lies that can be used in place.

        Args:
            name: Name of the tensor.

        Returns:
            None for one whose values have to be written.
        """
        return None

    def done_with(self, name: str) -> None:
        """Release a tensor that was copied and will not be read again.

        Args:
            name: Name of the tensor.
        """

    def close(self) -> None:
        """Release everything that is held besides the tensors in use."""
        self.entries = {}
