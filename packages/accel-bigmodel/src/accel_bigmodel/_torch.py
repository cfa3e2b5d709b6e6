"""The private names of torch that accel_bigmodel uses, each imported here and nowhere else.

A private name may change with any release of torch, so each comes with the reason why no public one serves. A test
looks each of them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves, tree_map_only

from accel_core.host.versions import is_torch_version

__all__ = [
    "PRIVATE_NAMES",
    "DisableTorchFunctionSubclass",
    "make_subclass",
    "make_wrapper",
    "tree_leaves",
    "tree_map_only",
    "without_greetings",
]

make_subclass = torch.Tensor._make_subclass
make_wrapper = torch.Tensor._make_wrapper_subclass


def without_greetings(stage: Any) -> Any:
    """Keep a stage on a CPU from greeting its neighbors before its first batch, in torch 2.9."""
    if is_torch_version(">=", "2.9") and is_torch_version("<", "2.10") and stage.device.type == "cpu":
        # Torch 2.9 sends an integer of 8 bytes there and expects a float of 4, so gloo aborts the process. The greeting
        # only opens connections, which gloo already has.
        stage._get_init_p2p_neighbors_ops = list
    return stage


PRIVATE_NAMES = {
    "torch._C:DisableTorchFunctionSubclass": (
        "Within its `__torch_function__` a placeholder is asked for its shape and its like, which would call that "
        "method again; the public way around it, `super().__torch_function__`, is for calls that came in there."
    ),
    "torch:Tensor._make_subclass": (
        "A leaf of a parameter's own class is made of data that lies where it has to; `as_subclass` stays attached to "
        "the history of the data, and a class's constructor may take other arguments."
    ),
    "torch:Tensor._make_wrapper_subclass": (
        "A packed weight has the shape and dtype of its values and other bytes; torch's page on subclasses names no "
        "other way to make a tensor without memory of its own."
    ),
    "torch.utils._pytree:tree_leaves": "What a call is given is looked through however torch nests it.",
    "torch.utils._pytree:tree_map_only": "Packed weights are unpacked wherever an operation takes them, in lists too.",
    "torch:Tensor._version": (
        "Torch's count of writes says whether a weight was written to; comparing values would read all of them."
    ),
    "torch.distributed.pipelining.stage:PipelineStage._get_init_p2p_neighbors_ops": (
        "Torch 2.9 exchanges numbers of different sizes in it; no option leaves it out."
    ),
}
"""Private names of torch, as `module:name`, each with the reason why it is needed."""

ONLY_IN = {
    "torch.distributed.pipelining.stage:PipelineStage._get_init_p2p_neighbors_ops": ("2.9", "2.10"),
}
"""The first torch that a private name is used in and the first that no longer needs it, where not all do."""
