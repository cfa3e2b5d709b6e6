"""The private names of torch that accel_bigmodel uses, each imported here and nowhere else.

A private name may change with any release of torch, so each comes with the reason why no public one serves. All are
known from torch 2.13 on, the oldest that is supported; a test looks each of them up.
"""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PRIVATE_NAMES", "DisableTorchFunctionSubclass", "TorchDispatchMode", "make_subclass", "tree_leaves"]

make_subclass = torch.Tensor._make_subclass

PRIVATE_NAMES = {
    "torch._C:DisableTorchFunctionSubclass": (
        "Within its `__torch_function__` a placeholder is asked for its shape and its like, which would call that "
        "method again; the public way around it, `super().__torch_function__`, is for calls that came in there."
    ),
    "torch:Tensor._make_subclass": (
        "A leaf of a parameter's own class is made of data that lies where it has to; `as_subclass` stays attached to "
        "the history of the data, and a class's constructor may take other arguments."
    ),
    "torch.utils._python_dispatch:TorchDispatchMode": (
        "Every tensor that a forward makes is counted, those of operations inside of others too; the public "
        "`TorchFunctionMode` sees calls from Python alone."
    ),
    "torch.utils._pytree:tree_leaves": "What an operation returns is looked through however torch nests it.",
    "torch:Tensor._version": (
        "Torch's count of writes says whether a weight was written to; comparing values would read all of them."
    ),
    "torch:UntypedStorage._cdata": (
        "Storages on the meta device have no addresses of data by which they could be told apart."
    ),
}
"""Private names of torch, as `module:name`, each with the reason why it is needed."""
