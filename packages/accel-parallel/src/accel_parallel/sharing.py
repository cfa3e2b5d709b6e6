"""What strategies have in common whose ranks train one model together, each with a part of it or of the data."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from accel_core.errors import PreparationError
from accel_core.optim.optimizer import Stepper, is_lomo
from accel_core.precision.precision import Precision
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Parts, PrecisionRequest
from accel_parallel.averaging import Averaging
from accel_parallel.context.parallel import ContextParallel
from accel_parallel.context.strategy import SequenceStrategy
from accel_parallel.experts.parallel import ExpertParallel
from accel_parallel.sharding.loading import receive_new
from accel_parallel.sharding.muon import orthogonalize_on_owners
from accel_parallel.sharding.optimizer_step import step_one_by_one
from accel_parallel.sharding.optimizers import check_optimizer
from accel_parallel.sharding.scaler import together
from accel_parallel.tensor.parallel import TensorParallel


class SharingStrategy(SequenceStrategy):
    """Averages the gradients of what every rank holds whole, and checks optimizers against the form of parameters."""

    averaging: Averaging

    def __init__(self, parts: Parts) -> None:
        # First, because they may refuse the run: a plugin is then as it was.
        self.tensor = TensorParallel(parts) if parts.layout.size("tp") > 1 else None
        self.experts = ExpertParallel(parts) if parts.layout.size("ep") > 1 else None
        self.initializes = self.initializes and self.experts is None
        super().__init__(parts)
        self.context = ContextParallel.of(parts)

    @property
    def _spreads(self) -> bool:
        """Whether ranks hold different parts of a replica."""
        return self.tensor is not None or self.experts is not None

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Return the number format, with a scaler by which ranks that share a replica skip a step together."""
        found = super().precision(asked)
        return together(found, asked, self.world) if self._spreads else found

    @property
    def forms(self) -> tuple[str, ...]:
        """What parameters are once they are shared; see `optimizers.Refused`."""
        return ()

    @property
    def mixes(self) -> bool:
        """Whether parameters of a model lie on several meshes, or some are spread over ranks and others whole."""
        return "several" in self.forms

    def check_optimizers(self, bundle: Bundle) -> None:
        """Also refuse optimizers that update before gradients are complete, or need more than a rank holds.

        Raises:
            PreparationError: A LOMO optimizer, or one of `optimizers.REFUSED` for the form that parameters have.
        """
        super().check_optimizers(bundle)
        if any(is_lomo(slot.given) for slot in bundle.optimizers):  # it leaves no gradient to reduce
            raise PreparationError(
                "A LOMO optimizer updates whole parameters inside backward, before ranks have reduced gradients; got "
                "one. Use another optimizer, or train in one process."
            )
        for slot in bundle.optimizers:
            check_optimizer(slot.given, self.forms)

    def adopt(self, model: torch.nn.Module) -> None:
        """Let parameters that a prepared model got start alike, and average their gradients too."""
        super().adopt(model)
        bare = self._bare(model)
        new = self.averaging.lacks(bare)
        receive_new(new, self.world)
        self.averaging.watch(bare, list(new.values()))
        if self.tensor is not None:
            self.tensor.watch(bare, again=bool(new))

    def stepper(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Return none, and let steps refuse what nobody averages: parameters of no prepared model, and gradients."""
        self.averaging.guard(optimizer, self._names)
        step_one_by_one(optimizer, lambda: self.mixes)  # asked at each step, as meshes mix after `prepare` only
        orthogonalize_on_owners(optimizer, self.world, self.layout)
        return None

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients; those of whole parameters are averaged where a window ends, and first ones compared."""
        with nullcontext() if self.tensor is None else self.tensor.around_backward():
            super().backward(loss, **kwargs)
        self.averaging.complete()
        if self.tensor is not None:
            self.tensor.check_replicas(loss, self.averaging)
