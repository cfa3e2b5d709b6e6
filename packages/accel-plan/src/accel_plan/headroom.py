"""Memory that a run needs besides the weights: activations, caches, logits."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import torch
from torch import nn

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_plan.live_bytes import LiveBytes


@record(frozen=True)
class Workload:
    """A forward pass to make room for.

    Attributes:
        batch: Sequences in a batch.
        sequence: Tokens in a sequence.
        args: Positional arguments of the forward instead of token numbers; shapes and dtypes are used alone.
        kwargs: Keyword arguments of the forward.

    Examples:
        >>> from accel import plan_device_map
        >>> workload = Workload(args=(torch.rand(8, 64),))
        >>> plan = plan_device_map(model, {"cpu": "1GB"}, headroom=workload)
        >>> plan.device_map
        {'': 'cpu'}
    """

    batch: int = 1
    sequence: int = 1
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def activation_bytes(model: nn.Module, workload: Workload, dtype: torch.dtype | None = None) -> int:
    """Trace a forward pass on the meta device and count the most bytes alive at once, weights left out."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, device="meta", dtype=cast)

    state = {name: empty(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    args = tuple(empty(value) if isinstance(value, torch.Tensor) else value for value in workload.args)
    kwargs = {name: empty(v) if isinstance(v, torch.Tensor) else v for name, v in workload.kwargs.items()}
    if not args and not kwargs:
        args = (torch.empty((workload.batch, workload.sequence), dtype=torch.long, device="meta"),)
    given = [value for value in (*state.values(), *args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    counter = LiveBytes("activations")
    counter.note(given, "given")
    before = counter.total
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), counter:
            output = torch.func.functional_call(model, state, args, kwargs)
        # Not before: caches and logits that the forward returns are alive when it ends, and count.
        del output
    except Exception as failure:
        raise ConfigurationError(
            f"The model's forward cannot be traced without data; got {type(failure).__name__}: {failure} Pass the "
            "headroom in bytes, or `Workload(args=..., kwargs=...)` with example inputs."
        ) from failure
    finally:
        for module, training in modes:  # each has its own: a part may be frozen
            module.training = training
    return counter.peak - before
