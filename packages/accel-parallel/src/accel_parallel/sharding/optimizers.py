"""Optimizers that need more of a parameter than a rank holds, or what torch cannot do with a distributed tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from accel_core._records import record
from accel_core.errors import PreparationError

if TYPE_CHECKING:
    import torch


@record(frozen=True)
class Refused:
    """An optimizer that does not train every form of parameter as it trains whole ones.

    Attributes:
        forms: The forms that it is refused with: "distributed" (DTensors, as FSDP2 and tensor parallel make), "flat" (a
            rank's piece of flattened parameters, as FSDP1 makes), "several" (DTensors on more than one rank), "split"
            (by tensor parallel, along any dim).
        why: What it does, after "which".
        instead: What to use.
    """

    forms: tuple[str, ...]
    why: str
    instead: str


_FACTORED = "scales a step by statistics of whole matrices, their rows and columns"
_LOW_BIT = ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8")
IN_BLOCKS = tuple(f"torchao.{name}" for name in _LOW_BIT)
"""Optimizers whose state of 4096 numbers or more is kept in few bits, by blocks; a rank's part that is not made of
whole blocks, or has fewer numbers, they keep in 32 bits."""

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
    "bitsandbytes.Optimizer8bit": Refused(
        ("distributed",),
        "has kernels that do not take distributed tensors",
        "Use torchao.optim.AdamW8bit under FSDP2, or AdamW",
    ),
    **dict.fromkeys(
        IN_BLOCKS,
        Refused(("split",), "rounds blocks of whole parameters together", "Use AdamW, or FSDP2 alone"),
    ),
}
"""Optimizers that are refused, by library and class; `tests/ranks/test_sharded_optimizers.py` measures that these fail,
and that no others do of torch, transformers, bitsandbytes, torchao and schedulefree."""

_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
EQUAL = (
    *(f"torch.{name}" for name in _ELEMENTWISE),
    *(f"schedulefree.{name}ScheduleFree" for name in ("AdamW", "RAdam", "SGD")),
)
"""Optimizers that train all forms of parameters as one process does; the same test measures it."""


def row_of(kind: type) -> tuple[str, Refused] | None:
    """Return the name and row of `REFUSED` for a class of optimizers: what derives from a refused one fails too."""
    names = (f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in kind.__mro__)
    return next(((name, REFUSED[name]) for name in names if name in REFUSED), None)


def check_optimizer(optimizer: torch.optim.Optimizer, forms: Iterable[str]) -> None:
    """Refuse an optimizer, or a subclass of it, that does not train parameters in their form."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    name, refused = row_of(kind) or ("", None)
    if refused is not None and not set(forms).isdisjoint(refused.forms):
        shown = name if name.endswith(f".{kind.__name__}") else f"{kind.__name__}, a {name}"
        raise PreparationError(
            f"An optimizer has to train what each rank holds of a parameter as it trains the whole; got {shown}, "
            f"which {refused.why}. {refused.instead}."
        )
