"""Optimizers that need more of a parameter than a rank holds, or what torch cannot do with a distributed tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from accel_core._records import record
from accel_core.errors import PreparationError

if TYPE_CHECKING:
    import torch

__all__ = ["ELEMENTWISE", "REFUSED", "Refused", "check_optimizer"]


@record(frozen=True)
class Refused:
    """An optimizer that does not train every form of parameter as it trains whole ones.

    Attributes:
        forms: The forms that it is refused with: "distributed" (DTensors, as FSDP2 and tensor parallel make), "flat" (a
            rank's piece of flattened parameters, as FSDP1 makes), "several" (DTensors on more than one rank).
        why: What it does, after "which".
        instead: What to use.
    """

    forms: tuple[str, ...]
    why: str
    instead: str


_FACTORED = "scales a step by statistics of whole matrices, their rows and columns"

REFUSED = {
    "torch.Adafactor": Refused(("distributed", "flat"), _FACTORED, "Use AdamW, or train without sharding"),
    "transformers.Adafactor": Refused(("distributed", "flat"), _FACTORED, "Use AdamW, or train without sharding"),
    "torch.LBFGS": Refused(
        ("several", "flat"),
        "chooses steps by scalar products over all parameters and by one rank's loss",
        "Use another optimizer, or train in one process",
    ),
    "torch.Muon": Refused(("flat",), "orthogonalizes whole matrices", "Use fsdp_version=2, which trains with it"),
    "torch.Rprop": Refused(
        ("distributed",),
        "writes through masks, which torch cannot do with distributed tensors",
        "Use fsdp_version=1, or another optimizer",
    ),
    "torch.SparseAdam": Refused(
        ("distributed", "flat"),
        "takes sparse gradients, which sharded parameters do not have",
        "Use Adam and sparse=False in embeddings",
    ),
}
"""Optimizers of torch and transformers that are refused, by library and class; `tests/ranks/test_sharded_optimizers.py`
measures that these and no others fail."""

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
"""Optimizers of torch that train all forms of parameters as one process does; the same test measures it."""


def check_optimizer(optimizer: torch.optim.Optimizer, forms: Iterable[str]) -> None:
    """Refuse an optimizer, or a subclass of it, that does not train parameters in their form."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for kind in type(optimizer).__mro__:  # what derives from a refused one fails alike
        name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        refused = REFUSED.get(name)
        if refused is not None and not set(forms).isdisjoint(refused.forms):
            raise PreparationError(
                f"An optimizer has to train what each rank holds of a parameter as it trains the whole; got {name}, "
                f"which {refused.why}. {refused.instead}."
            )
