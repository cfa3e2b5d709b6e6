"""What DeepSpeed's engine holds and gathers for stage 3 of ZeRO, laid out as the engine does it.

At rest a rank has, of every parameter, the part that falls to it: one flat piece of memory in the dtype of the weights,
a copy of it in 32 bits on which the optimizer steps, a flat piece for the gradients of these parts, and the bucket in
which gradients wait to be reduced. A step then goes like this:

1. Before a module runs, forward or backward, its parameters are gathered, and those of the modules that run next, up
   to a number of elements. The engine knows what runs next from the first pass, which it records.
2. After a module has run, its parameters are dropped, unless they are small, were gathered for a later module, or are
   used again soon. Soon is far: a model of fewer than a billion elements stays gathered from the forward pass on.
3. A gradient is copied into the bucket if it fits. A full bucket is reduced in a copy, of which this rank adds its part
   to the flat piece.
4. Before the optimizer steps, all parameters are dropped and norms are computed. Groups of parts are stepped on one
   after the other, each with a copy of its gradients in 32 bits. Then the small parameters are gathered again.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_core.errors import EngineUnavailableError
from accel_plan.training.graph_markers import Watched, linear, mapped, mark
from accel_plan.training.limits import ZeroLimits

__all__ = ["ShardedZeroEngine"]


class _Shared:
    """A parameter of which each rank has a part; it has no elements while it is not gathered."""

    def __init__(self, parameter: nn.Parameter, number: int, part: torch.Tensor, most_kept: int) -> None:
        self.parameter, self.number, self.shape, self.part = parameter, number, parameter.shape, part
        self.kept = self.count <= most_kept  # stays gathered between steps
        self.users: set[nn.Module] = set()  # the modules that are using it
        self.empty()

    @property
    def count(self) -> int:
        """Its elements."""
        return self.shape.numel()

    def fill(self, gathered: torch.Tensor) -> None:
        """Let the parameter lie in a piece of memory that has its elements."""
        self.parameter.data = gathered[: self.count].view(self.shape)

    def empty(self) -> None:
        """Let the parameter have no elements."""
        self.parameter.data = self.part.new_empty(0)
        self.here = False


class _Gathering:
    """Parameters that travel together, from which on they take memory; they can be used when they have arrived."""

    def __init__(self, shared: list[_Shared], ranks: int) -> None:
        self._shared = shared
        self.buffer: torch.Tensor | None = None
        if ranks == 1:
            for each in shared:
                each.fill(each.part)
            return
        self.buffer = shared[0].part.new_empty(ranks * sum(each.part.numel() for each in shared))
        if len(shared) == 1:
            shared[0].fill(self.buffer)

    def arrive(self) -> list[torch.Tensor]:
        """Copy the parameters out of the buffer, which lives as long as one of them was not asked for."""
        arrived, self._shared = self._shared, []
        for each in arrived:
            if self.buffer is not None and len(arrived) > 1:
                each.fill(self.buffer.new_empty(each.count))
            each.here = True
        return [] if self.buffer is None else [each.parameter.data for each in arrived]


class ShardedZeroEngine:
    """The first rank's part of what stage 3 shares.

    Attributes:
        masters: The copies of this rank's parts on which the optimizer steps.
        bucket: What gradients are reduced in.
        tell: Called with memory and what it is for.
    """

    def __init__(self, model: nn.Module, ranks: int, bucket: int, limits: ZeroLimits) -> None:
        self._model, self._ranks, self._size, self._limits = model, ranks, bucket, limits
        parameters = list(model.parameters())
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        first = self._trained[0].detach()
        lengths = {parameter: -(-parameter.numel() // ranks) for parameter in parameters}
        self._weights = first.new_empty(sum(lengths[parameter] for parameter in self._trained))
        self._gradients = torch.empty_like(self._weights)
        self.bucket: torch.Tensor = first.new_empty(bucket)
        self.note: Callable[[Iterable[torch.Tensor], str], None] = lambda tensors, purpose: None
        parts = dict(
            zip(self._trained, torch.split(self._weights, [lengths[each] for each in self._trained]), strict=True)
        )
        self._shared: dict[nn.Parameter, _Shared] = {}
        for number, parameter in enumerate(parameters):
            part = parts[parameter] if parameter in parts else parameter.detach().new_empty(lengths[parameter])
            self._shared[parameter] = _Shared(parameter, number, part, limits.kept)
        self._groups = self._grouped()
        self.masters = [
            nn.Parameter(first.new_empty(sum(each.part.numel() for each in group), dtype=torch.float32))
            for group in self._groups
        ]
        self._waiting: list[nn.Parameter] = []
        self._order: list[nn.Module] = []
        self._recorded = self._forward = False
        self._queue: deque[tuple[_Shared, int]] = deque()
        self._position = self._alive = 0
        self._last_use: dict[_Shared, int] = {}
        self._coming: dict[_Shared, _Gathering] = {}
        self._running: list[nn.Module] = []
        self._backward: dict[nn.Module, None] = {}
        self._outputs: Counter[nn.Module] = Counter()
        self._inputs: Counter[nn.Module] = Counter()
        self._uses = {
            module: [self._shared[parameter] for parameter in module.parameters(recurse=False)]
            for module in model.modules()
        }
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(self._begin_pass)
        for module in model.modules():
            module._parameters = Watched(module._parameters, self._asked)
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)

    def _grouped(self) -> list[list[_Shared]]:
        """Return the parameters that train, in groups of which each is stepped on at once."""
        groups: list[list[_Shared]] = []
        full = True
        for parameter in self._trained:
            if full:
                groups.append([])
            groups[-1].append(self._shared[parameter])
            full = sum(each.part.numel() for each in groups[-1]) >= self._limits.group
        return groups

    @property
    def held(self) -> dict[str, list[torch.Tensor]]:
        """What this rank has at rest, by what it is for."""
        return {
            "weights": [each.part for each in self._shared.values()],
            "optimizer": list(self.masters),
            "gradients": [self._gradients],
            "communication": [self.bucket],
        }

    @property
    def sums(self) -> list[torch.Tensor]:
        """The gradients of this rank's parts that backward passes have left."""
        return [self._gradients]

    def in_bucket(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in the bucket."""
        return bool(gradient.untyped_storage()._cdata == self.bucket.untyped_storage()._cdata)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Multiply by weights as the engine lets torch do: without a view of them that would keep them gathered."""
        plain = nn.functional.linear
        nn.functional.linear = linear  # type: ignore[assignment]
        try:
            yield
        finally:
            nn.functional.linear = plain

    @torch.no_grad()
    def end_pass(self, last: bool) -> None:
        """Reduce what waits in the bucket, and drop what modules whose inputs have no gradients left gathered."""
        self._reduce()
        while self._backward:
            module, _ = self._backward.popitem()
            for each in self._uses[module]:
                each.users.discard(module)
                if not each.kept:
                    self._drop(each)

    @torch.no_grad()
    def finish(self) -> None:
        """Drop all parameters, and compute the norm of the gradients."""
        for gathering in self._coming.values():
            self.note(gathering.arrive(), "communication")
        self._coming.clear()
        for each in self._shared.values():
            each.users.clear()
            self._drop(each)
        for each in self._shared.values():
            if each.parameter.requires_grad:
                each.part.double().norm()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step on one group of parts after the other, and gather the small parameters again."""
        gradients = torch.split(self._gradients, [master.numel() for master in self.masters])
        for group, master, gradient in zip(self._groups, self.masters, gradients, strict=True):
            flat = torch.empty_like(gradient) if len(group) > 1 else gradient
            master.grad = flat.to(master.dtype)
            self.note([master.grad], "gradients")
            del flat
            optimizer.param_groups[0]["params"] = [master]
            optimizer.step()
            master.grad = None
        optimizer.param_groups[0]["params"] = list(self.masters)
        for each in self._shared.values():
            if each.kept:
                self.note(_Gathering([each], self._ranks).arrive(), "communication")

    def _asked(self, parameter: nn.Parameter) -> None:
        """Gather a parameter that a forward pass reads from outside its module."""
        each = self._shared.get(parameter)
        if each is None or each.here or each in self._coming or not self._forward:
            return
        uses = self._uses[self._running[-1]]
        uses += [] if each in uses else [each]
        self.note(_Gathering([each], self._ranks).arrive(), "communication")

    @torch.no_grad()
    def _begin_pass(self, model: nn.Module, inputs: object) -> None:
        """Begin to record, or to follow what was recorded."""
        for each, gathering in self._coming.items():
            self.note(gathering.arrive(), "communication")
            self._drop(each)
        self._coming.clear()
        self._recorded = bool(self._order)
        self._queue = deque(
            (each, position)
            for position, module in enumerate(self._order)
            for each in sorted(self._uses[module], key=lambda each: each.number)
        )
        self._last_use = {}
        self._position = self._alive = 0
        self._forward = True

    def _before(self, module: nn.Module, inputs: object) -> Any:
        """Gather before the forward pass of a module; mark where its backward pass ends."""
        self._running.append(module)
        self._fetch(module)
        self._inputs[module] = 0

        def marked(tensor: torch.Tensor) -> torch.Tensor:
            self._inputs[module] += tensor.requires_grad
            return mark(tensor, partial(self._after_backward, module))

        return mapped(marked, inputs)

    def _after(self, module: nn.Module, inputs: object, output: Any) -> Any:
        """Drop after the forward pass of a module; mark where its backward pass begins."""
        self._running.pop()
        self._release(module)
        self._forward = self._forward and module is not self._model

        def marked(tensor: torch.Tensor) -> torch.Tensor:
            self._outputs[module] += 1
            return mark(tensor, partial(self._before_backward, module))

        return mapped(marked, output)

    def _before_backward(self, module: nn.Module) -> None:
        if self._outputs[module] > 0:
            self._backward[module] = None
            self._fetch(module)
            self._outputs[module] -= 1

    def _after_backward(self, module: nn.Module) -> None:
        self._inputs[module] -= 1
        if self._inputs[module] == 0:
            self._release(module)
            self._backward.pop(module, None)

    @torch.no_grad()
    def _fetch(self, module: nn.Module) -> None:
        """Gather what a module needs, and then what modules need that run next."""
        if not self._recorded:
            self._order.append(module)
        elif self._order[self._position : self._position + 1] != [module]:
            raise EngineUnavailableError(
                "Memory of stage 3 is predicted for models whose modules run in the same order in each pass; got a "
                f"{type(module).__name__} at another place in the second pass. Plan zero2 or fsdp."
            )
        wanted = self._uses[module]
        self._gather(wanted)
        for each in wanted:
            each.users.add(module)
            if each in self._coming:
                self.note(self._coming.pop(each).arrive(), "communication")
        if self._recorded:
            self._fetch_ahead(wanted)
        self._position += 1

    def _fetch_ahead(self, wanted: list[_Shared]) -> None:
        """Gather for the modules that run next, after those of this one were taken off the queue."""
        missing = sum(self._last_use.get(each, -1) < self._position for each in wanted)
        passed: set[_Shared] = set()
        while self._queue and len(passed) < missing:
            each, position = self._queue.popleft()
            self._last_use[each] = position
            passed.add(each)
        room, ahead = min(self._limits.alive - self._alive, self._limits.ahead), set[_Shared]()
        while self._queue and room > 0:
            each, position = self._queue.popleft()
            self._last_use[each] = max(self._last_use.get(each, -1), position)
            if not (each.here or each in self._coming or each in ahead):
                ahead.add(each)
                room -= each.count
        self._gather(ahead)

    def _gather(self, wanted: Iterable[_Shared]) -> None:
        """Let those of some parameters travel that are not there."""
        away = {each for each in wanted if not each.here and each not in self._coming}
        if not away:
            return
        self._alive += sum(each.count for each in away)
        gathering = _Gathering(sorted(away, key=lambda each: each.number), self._ranks)
        if gathering.buffer is not None:
            self.note([gathering.buffer], "communication")
        self._coming |= dict.fromkeys(away, gathering)

    @torch.no_grad()
    def _release(self, module: nn.Module) -> None:
        """Drop what a module needed and what nothing needs soon; all of it in the first pass."""
        found = self._uses[module]
        unneeded = {each for each in found if not self._recorded or self._is_done(each)}
        seen = 0
        for later in self._order[self._position :] if self._recorded else []:
            if seen >= self._limits.soon or not unneeded:
                break
            used = self._uses[later]
            unneeded.difference_update(used)
            seen += sum(each.count for each in used)
        for each in found:
            each.users.discard(module)
            if each in unneeded:
                self._drop(each)

    def _is_done(self, each: _Shared) -> bool:
        """Return whether a parameter does not stay between steps, and was not passed over for a later module."""
        return not each.kept and self._last_use.get(each, -1) <= self._position

    def _drop(self, each: _Shared) -> None:
        if each.here and not each.users:
            each.empty()
            self._alive -= each.count

    @torch.no_grad()
    def _made(self, parameter: nn.Parameter) -> None:
        """Take a gradient that the backward pass has made."""
        assert parameter.grad is not None
        count = parameter.grad.numel()
        used = sum(self._shared[each].count for each in self._waiting)
        if used + count > self._size:
            self._reduce()
            used = 0
        if count <= self._size:  # a larger one is reduced where it is
            place = self.bucket[used : used + count].view_as(parameter.grad)
            parameter.grad.data = place.copy_(parameter.grad)
        self._waiting.append(parameter)

    def _reduce(self) -> None:
        """Reduce what waits, in a copy unless it is one gradient that divides evenly; keep this rank's parts."""
        parts = [self._shared[each].part.numel() for each in self._waiting]
        if len(parts) > 1 or any(self._shared[each].count % self._ranks for each in self._waiting):
            self.note([self.bucket.new_empty(self._ranks * sum(parts))], "communication")
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting = []
