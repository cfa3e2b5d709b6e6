"""What takes part in a run at the borders of its runtime: where objects are prepared, around a pass, a step, a save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from accel_core.data.loader import PreparedLoader
from accel_core.mesh.layout import Layout
from accel_core.optim.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
    from accel_core.runtime import Runtime


class Extension:
    """Takes part in a run. Every method here leaves the run as it is; a subclass overrides what it needs.

    The row of an engine names its class, and a handler (`KwargsHandler.extension`) or ACCELERATE_RUNTIME the engine. A
    run may have several. Where a method is given `run`, that is the border itself, and what the extensions before this
    one put around it.

    Args:
        runtime: The run, whose `extensions` hold this one once all of them are made.

    Examples:
        >>> class Shouting(Extension):
        ...     def step(self, run, optimizer, closure):
        ...         print("a step")
        ...         return run(closure)
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def reading(self, layout: Layout) -> Layout:
        """Return which part of the data each rank reads from a loader that is prepared now.

        Args:
            layout: The parts without this extension.
        """
        return layout

    def keep_model(self, model: nn.Module) -> None:
        """See a prepared model before it is registered; an error leaves it out.

        Args:
            model: As the script gets it.
        """

    def keep_loader(self, loader: PreparedLoader) -> None:
        """See a prepared loader before it is registered; an error leaves it out.

        Args:
            loader: As the script gets it.
        """

    def read(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass the batches of an iteration on.

        Args:
            loader: The prepared loader that is read.
            batches: Its batches.
        """
        return batches

    def backward(self, run: Callable[..., None], loss: Tensor, weight: object, arguments: dict[str, Any]) -> None:
        """Compute the gradients of a loss by `run(loss, weight, arguments)`; see `Accelerator.backward`."""
        run(loss, weight, arguments)

    def step(self, run: Callable[..., object], optimizer: AcceleratedOptimizer, closure: object) -> object:
        """Step where an accumulation window ends, by `run(closure)`; see `AcceleratedOptimizer.step`."""
        return run(closure)

    def save_state(self, run: Callable[..., Any], output_dir: str | os.PathLike[str] | None, **given: object) -> object:
        """Save the state of the run by `run(output_dir, **given)`; see `Accelerator.save_state`."""
        return run(output_dir, **given)

    def timed(self, part: str) -> AbstractContextManager[object]:
        """Return a block to put around an exchange between ranks, or around a save.

        Args:
            part: `"exchange"` or `"saving"`.
        """
        return nullcontext()

    def uneven(self) -> AbstractContextManager[object]:
        """Return a block to put around one in which ranks make different numbers of steps."""
        return nullcontext()

    def release(self) -> None:
        """Let go of every prepared object."""
