"""The private names of torch that accel_plan uses, each imported here and nowhere else.

A private name may change with any release of torch, so each comes with the reason why no public one serves. A test
looks each of them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PRIVATE_NAMES", "TorchDispatchMode", "fake_store", "tree_leaves", "without_votes"]


def fake_store() -> Any:
    """Return the store of a process group of one process that has the size of many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def without_votes(kind: type[Any]) -> type[Any]:
    """Return the class of a stage whose shapes are known, of which no other rank is asked."""

    class Stage(kind):  # type: ignore[misc]
        def _warmup_backward_result(self, *_: object, **__: object) -> torch.Tensor:
            return torch.tensor(1)  # what all stages of known shapes agree on

    return Stage


PRIVATE_NAMES = {
    "torch.utils._python_dispatch:TorchDispatchMode": (
        "Every tensor that a forward makes is counted, those of operations inside of others too; the public "
        "`TorchFunctionMode` sees calls from Python alone."
    ),
    "torch.utils._pytree:tree_leaves": "What an operation returns is looked through however torch nests it.",
    "torch.testing._internal.distributed.fake_pg:FakeStore": (
        "One process stands for a rank of many: torch's fake process group, which it documents, needs this store."
    ),
    "torch.distributed.pipelining.stage:PipelineStage._warmup_backward_result": (
        "Ranks ask one another whether shapes are known, and read the answer, which a rank among fakes has not."
    ),
    "torch:UntypedStorage._cdata": (
        "Storages on the meta device have no addresses of data by which they could be told apart."
    ),
}
"""Private names of torch, as `module:name`, each with the reason why it is needed."""

ONLY_IN = {
    "torch.distributed.pipelining.stage:PipelineStage._warmup_backward_result": ("2.13", "2.15"),
}
"""The first torch that a private name is used in and the first that no longer needs it, where not all do."""
