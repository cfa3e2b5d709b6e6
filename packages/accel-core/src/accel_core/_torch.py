"""The private names of torch that accel_core uses, each imported here and nowhere else.

A private name may change with any release of torch, so each comes with the reason why no public one serves and the
first version of torch that is known to have it. A test looks each of them up in the oldest torch that is supported.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import _weights_only_unpickler as weights_only_unpickler
from torch.distributed.distributed_c10d import _get_default_store as default_store

__all__ = ["PRIVATE_NAMES", "PrivateName", "default_store", "weights_only_unpickler"]


class PrivateName(NamedTuple):
    """A private name of torch.

    Attributes:
        path: Where torch has it, as `module:name`.
        reason: Why it is needed.
    """

    path: str
    reason: str


PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store",
        "Ranks that check where the others are need a store that works while collectives hang; no public name returns "
        "the store of the default process group.",
    ),
    PrivateName(
        "torch._weights_only_unpickler:_get_allowed_globals",
        "What a pickled file may name has to be less than torch's list, which has constructors of unwritten memory; "
        "torch.serialization only adds to it.",
    ),
    PrivateName(
        "torch._weights_only_unpickler:Unpickler",
        "Files older than torch 1.6 are read with storages that hold the file's bytes; torch.load makes them first.",
    ),
    PrivateName(
        "torch._utils:_sparse_tensors_to_validate",
        "A load that failed leaves its sparse tensors there, for which torch would refuse the next one.",
    ),
)
