"""Which parts of a model are sharded one by one, and which parameters are not sharded at all."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accel_core._records import record
from accel_core.errors import PreparationError
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.plugin_policies import bind_wrap_policy

_logger = logging.getLogger(__name__)

_Policy = Callable[..., bool]
_HALF = (torch.float16, torch.bfloat16)
_MARKS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_READ = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights other code reads without calling them, as kernels and encoders of positions do."""


@record(frozen=True)
class WrapPlan:
    """How a model is taken apart.

    Attributes:
        blocks: Modules that are sharded one by one, with their names; those inside others come first. The model itself,
            which takes what is left, is not among them.
        replicated: Names of the parameters that are not sharded: each rank keeps a whole copy, or its own experts.
        heads: A head that is sharded on its own as well, and is not a block in which activations are computed again.
        kept: Modules that compute in 32 bits where the others do not, because the model says so.
        cast: Names of parameters and buffers of which it says so too, and that are cast nevertheless.
    """

    blocks: tuple[tuple[str, nn.Module], ...]
    replicated: tuple[str, ...]
    heads: tuple[tuple[str, nn.Module], ...] = ()
    kept: tuple[tuple[str, nn.Module], ...] = ()
    cast: tuple[str, ...] = ()

    def groups(self) -> list[tuple[str, nn.Module]]:
        """Return what FSDP2 shards one by one, with its names; modules inside others come first."""
        named = {id(module): (name, module) for name, module in (*self.blocks, *self.heads, *self.kept)}
        return sorted(named.values(), key=lambda each: -each[0].count("."))

    def keeps(self, module: nn.Module) -> bool:
        """Return whether a module, or one that it is part of, computes in 32 bits where others do not."""
        return any(module is part for _, each in self.kept for part in each.modules())

    def found_in(self, model: nn.Module) -> WrapPlan:
        """Return the plan with the modules that now stand under the names of its blocks."""

        def now(parts: Iterable[tuple[str, nn.Module]]) -> tuple[tuple[str, nn.Module], ...]:
            return tuple((name, model.get_submodule(name)) for name, _ in parts)

        return replace(self, blocks=now(self.blocks), heads=now(self.heads), kept=now(self.kept))

    def with_head(self, model: nn.Module, head: nn.Module) -> WrapPlan:
        """Return the plan with a head on its own, where nothing else has its parameters."""
        taken = {id(part) for _, block in self.groups() for part in block.modules()}
        kept = {id(parameter) for parameter in self.whole(model)}
        if id(head) in taken or any(id(each) in kept for each in head.parameters()):
            return self
        named = [(name, module) for name, module in model.named_modules() if module is head]
        return replace(self, heads=tuple(_without_ties(model, named)))

    def whole(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that are not sharded."""
        return [model.get_parameter(name) for name in self.replicated]

    def refuse_one_piece(self, model: nn.Module) -> None:
        """Refuse to checkpoint activations where there are no blocks."""
        if not self.blocks:
            raise PreparationError(
                f"Activation checkpointing works block by block; got {type(model).__name__}, in which no block was "
                "found. Name its blocks in transformer_cls_names_to_wrap, or set activation_checkpointing=False."
            )

    def log(self, model: nn.Module) -> None:
        """Log the plan, as a warning where nothing is sharded on its own."""
        name = type(model).__name__
        if self.blocks:
            kinds = sorted({type(block).__name__ for _, block in self.blocks})
            _logger.info("%s is sharded in %d blocks (%s) and a rest.", name, len(self.blocks), ", ".join(kinds))
        else:
            _logger.warning(
                "%s is sharded as one piece: all of its parameters are gathered at once, so little memory is saved. "
                "Name its blocks in transformer_cls_names_to_wrap, or set auto_wrap_policy.",
                name,
            )
        if self.replicated:
            _logger.info("%s keeps %s unsharded.", name, ", ".join(self.replicated))
        if self.cast:
            _logger.warning(
                "FSDP casts what %s says it keeps in 32 bits, unless it is a whole module that FSDP can keep so; got "
                "%s. Name the modules around parameters in ignored_modules, and leave buffer_dtype out of the policy.",
                name,
                ", ".join(self.cast),
            )


def plan(model: nn.Module, plugin: FullyShardedDataParallelPlugin, left_out: Collection[str] = ()) -> WrapPlan:
    """Decide how a model is taken apart; changes nothing.

    Without a policy, the blocks are those of lists and sequences that hold modules of one class, as a transformer lists
    its layers.

    Raises:
        ConfigurationError: A class that is to be sharded on its own does not occur, or the policy is of another kind.
    """
    ignored = ignored_modules(model, plugin)
    inside = {id(part) for module in ignored for part in module.modules()}
    policy = wrap_policy(model, plugin)
    found = list(_repeated("", model, inside) if policy is None else _chosen(model, policy, inside))
    exact = {name: each for name, each in _in_float32(model, plugin).items() if name not in left_out}
    kept = _modules_of(model, exact)
    if plugin.fsdp_version == 2:
        kept = list(_without_ties(model, [(name, each) for name, each in kept if not isinstance(each, _READ)]))
    elif plugin.param_dtype is torch.float16:  # whose scaler wants all gradients sharded
        kept = []
    else:  # of which a parameter that is not sharded is not cast
        left_out = {*left_out, *(name for name, each in exact.items() if isinstance(each, nn.Parameter))}
    whole = {id(parameter) for module in ignored for parameter in module.parameters()}
    # A scalar has no dim to shard.
    replicated = [n for n, p in model.named_parameters() if id(p) in whole or p.dim() == 0 or n in left_out]
    # Of what another axis spreads there is nothing to shard: experts of a list are not blocks.
    spread = {id(model.get_parameter(name)) for name in left_out}
    found = [(name, each) for name, each in found if not spread or any(id(p) not in spread for p in each.parameters())]
    safe = {id(each) for _, module in kept for each in module.parameters()} | spread | whole
    cast = tuple(name for name, each in exact.items() if id(each) not in safe)
    return WrapPlan(tuple(_without_ties(model, found)), tuple(replicated), kept=tuple(kept), cast=cast)


def _in_float32(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> dict[str, torch.Tensor]:
    """Return what a model says it keeps in 32 bits and a policy casts, by name: parameters, and buffers under FSDP1."""
    policy: Any = plugin.mixed_precision_policy
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules() if plugin.param_dtype in _HALF else ():
        patterns = [each for mark in _MARKS for each in getattr(module, mark, None) or ()]
        if patterns:
            wanted = re.compile(rf"(^|\.)({'|'.join(patterns)})(\.|$)")  # on whole words of names, as transformers 4
            cast = module.named_buffers() if plugin.fsdp_version == 1 and policy.buffer_dtype in _HALF else ()
            named = ((name, each) for name, each in (*module.named_parameters(), *cast) if wanted.search(name))
            found |= {f"{prefix}.{name}".lstrip("."): each for name, each in named if each.dtype is torch.float32}
    return found


def _modules_of(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules, without the model, that compute with no other parameters than the given ones."""
    given, found = {id(each) for each in tensors.values()}, dict[str, nn.Module]()
    for name, module in model.named_modules():
        own = [id(parameter) for parameter in module.parameters()]
        fits = own and given.issuperset(own) and _can_run(module) and module is not model
        if fits and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return list(found.items())


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of lists that hold modules of one class, by name, without those that share a parameter."""
    return dict(_without_ties(model, list(_repeated("", model, set()))))


def ignored_modules(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """Return the modules of a model that the plugin leaves unsharded: those given, or those whose name matches."""
    given = plugin.ignored_modules
    if given is None:
        return []
    if isinstance(given, str):
        return modules_named(model, given)
    wanted = {id(module) for module in given}
    return [module for module in model.modules() if id(module) in wanted]


def modules_named(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the modules of a model whose whole dotted name matches a regular expression."""
    return [module for name, module in model.named_modules() if re.fullmatch(pattern, name)]


def wrap_policy(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> _Policy | None:
    """Return the plugin's policy with the classes or the size that it needs, or `None` where it names no blocks."""
    given = plugin.transformer_cls_names_to_wrap, plugin.min_num_params
    found: _Policy | None = bind_wrap_policy(plugin.auto_wrap_policy, model, *given)
    return found


def _chosen(model: nn.Module, policy: _Policy, ignored: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield what a policy chooses, asked as torch's FSDP asks it: on the way down, and again for what is left."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> int:
        size = sum(parameter.numel() for parameter in module.parameters())
        taken = 0
        # A module that two places share is one block.
        if id(module) in seen or not policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        seen.add(id(module))
        for child_name, child in module.named_children():
            if id(child) not in ignored:
                taken += visit(f"{name}.{child_name}" if name else child_name, child)
        if module is model or not _can_run(module):
            return taken
        if size and policy(module=module, recurse=False, nonwrapped_numel=size - taken):
            found.append((name, module))
            return size
        return taken

    visit("", model)
    yield from found


def _repeated(name: str, module: nn.Module, ignored: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost blocks of lists that hold modules of one class."""
    children = [(own, child) for own, child in module.named_children() if id(child) not in ignored]
    prefix = f"{name}." if name else ""
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1:
        first = children[0][1]
        same_kind = all(type(child) is type(first) for _, child in children) and any(True for _ in first.parameters())
        if same_kind and _can_run(first):
            # One that is listed twice is one block.
            yield from {id(block): (prefix + own, block) for own, block in children}.values()
            return
    for own, child in children:
        yield from _repeated(prefix + own, child, ignored)


def _can_run(module: nn.Module) -> bool:
    """Return whether a module computes something, so that its parameters can be gathered for that."""
    # torch gathers in forward, which lists never run.
    return type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


# A tie over two blocks would be gathered by one and used by the other.
def _without_ties(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Leave blocks out that share a parameter with something outside: one group has to hold it."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(module))
    for name, block in blocks:
        within = {id(part) for part in block.modules()}
        if all(holders[id(parameter)] <= within for parameter in block.parameters()):
            yield name, block
        else:
            _logger.info("%s shares a parameter with another part of the model; both are sharded together.", name)
