"""Which modules of a model are split over ranks, and how: read from a plan and checked, before anything changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from accel_core._records import record
from accel_core.errors import PreparationError

_HEADS = ("num_attention_heads", "num_key_value_heads")
_HEAD_SIZES = ("head_dim", "attention_head_size")
"""How models of transformers, and others, call the size of one head in their modules of attention."""

_PACKED = re.compile(r"(?i)(^|_)(w?qkv|kqv|c_attn|gate_up)(_|$)")
"""Last parts of names of layers whose columns are several products, one after the other."""

_CUT = {
    (nn.Linear, ColwiseParallel): ("out_features", 0),
    (nn.Linear, RowwiseParallel): ("in_features", 1),
    (nn.Embedding, ColwiseParallel): ("embedding_dim", 1),
    (nn.Embedding, RowwiseParallel): ("num_embeddings", 0),
}
"""For a kind of module and a style, which of its sizes is divided, and along which dimension of its weight."""


@record(frozen=True)
class TensorPlan:
    """How a model is split.

    Attributes:
        styles: Names of modules, and the style of each; empty for a model that arrived split.
        ties: Names of one parameter that stands in several modules, all of which are split in the same way.
    """

    styles: tuple[tuple[str, ParallelStyle], ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()


def plan_of(model: nn.Module, given: Mapping[str, ParallelStyle | str] | str, size: int) -> TensorPlan:
    """Return how a bare model is split; changes nothing.

    Raises:
        PreparationError: There is no plan, or it does not fit the model or the number of ranks.
    """
    own = isinstance(given, str)
    patterns = _own_plan(model, size) if isinstance(given, str) else given
    modules = dict(model.named_modules())
    styles: dict[str, ParallelStyle] = {}
    for pattern, wanted in patterns.items():
        style = _style(wanted, pattern)
        found = [name for name in modules if _matches(name, pattern)]
        # A plan of transformers covers all variants of a model; one that a user wrote is meant word for word.
        if not found and not own:
            raise PreparationError(_nowhere(model, pattern, modules))
        for name in found:
            if name in styles:
                raise PreparationError(
                    f"A module is split in one way; got two patterns for {name}, the second of them {pattern!r}. "
                    "Keep one of them in the plan."
                )
            if style is not None:
                _check_size(name, modules[name], style, size)
                if not own:
                    _check_heads(model, name, style, size)
                    _check_packed(name, style)
                styles[name] = style
    if not styles:
        raise PreparationError(_nowhere(model, ", ".join(patterns), modules))
    return TensorPlan(tuple(styles.items()), tuple(_ties(model, styles)))


def _own_plan(model: nn.Module, size: int) -> Mapping[str, Any]:
    """Return the plan that a model has itself."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise PreparationError(
            f"Tensor parallel needs a plan of which modules are split; got {type(model).__name__}, which has none and "
            "is not split already. Pass ParallelismConfig(tp_handler=TorchTensorParallelConfig(tp_plan={...})), or "
            "load a model of transformers with distributed_config=DistributedConfig(tp_size=...)."
        )
    config: Any = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    heads = {name: getattr(config, name, None) for name in _HEADS}
    uneven = {name: count for name, count in heads.items() if isinstance(count, int) and count % size}
    if uneven:
        raise PreparationError(
            f"Heads of attention are divided among the ranks of tensor parallel; got {uneven} of "
            f"{type(model).__name__} and {size} ranks. Use a tp_size that divides them, or write a plan without "
            "attention."
        )
    return plan


def _style(wanted: object, pattern: str) -> ParallelStyle | None:
    """Return a style of torch; `None` for what stays whole."""
    if isinstance(wanted, ParallelStyle):
        return wanted
    named = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
        "replicate": lambda: None,
    }
    if not isinstance(wanted, str) or wanted not in named:
        raise PreparationError(
            f"A plan of tensor parallel has styles of torch.distributed.tensor.parallel, or one of the names "
            f"{', '.join(named)}; got {wanted!r} for {pattern!r}. Use one of them, or load a model of transformers "
            "with distributed_config=DistributedConfig(tp_size=...), which knows more."
        )
    return named[wanted]()  # type: ignore[no-any-return, operator]


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a dotted name, part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nowhere(model: nn.Module, pattern: str, modules: Mapping[str, nn.Module]) -> str:
    # Layers by one name, as plans write them.
    known = {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules if name}
    near = get_close_matches(pattern, known, n=3, cutoff=0.0)
    return (
        f"A pattern of a plan of tensor parallel matches modules by their dotted names; got {pattern!r}, which matches "
        f"none of {type(model).__name__}. The nearest names are {', '.join(near) or 'none: it has no modules'}."
    )


def _check_size(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    """Refuse a module that cannot be divided evenly."""
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return
    cut = _cut(module, style)
    if cut is None:
        raise PreparationError(
            f"{type(style).__name__} splits linear layers and embeddings; got {name}, a {type(module).__name__}. "
            "Name another module in the plan, or use a style of your own."
        )
    whole = getattr(module, cut[0])
    weight: Any = module.weight
    # Quantized: columns of the packed bytes are not columns of the weight.
    if not weight.is_floating_point() or weight.shape[cut[1]] != whole:
        raise PreparationError(
            f"Packed weights cannot be split by columns and rows; got {name}, a {type(module).__name__} whose weight "
            f"of {cut[0]}={whole} is {tuple(weight.shape)} in {weight.dtype}. Load the model unpacked."
        )
    if whole % size:
        raise PreparationError(
            f"Ranks of tensor parallel hold parts of equal size; got {cut[0]}={whole} of {name} and {size} ranks. "
            "Use a tp_size that divides it, or leave the module out of the plan."
        )


def _check_heads(model: nn.Module, name: str, style: ParallelStyle, size: int) -> None:
    """Refuse to cut a head of attention in two: one rank computes all that belongs to it."""
    attention, _, _ = name.rpartition(".")
    known = (getattr(model.get_submodule(attention), attribute, None) for attribute in _HEAD_SIZES)
    head = next((value for value in known if isinstance(value, int)), 0)
    cut = _cut(module := model.get_submodule(name), style)
    width = getattr(module, cut[0]) if cut is not None and _stays_split(style) else 0
    if head and width % head == 0 and width // head % size:
        raise PreparationError(
            f"Heads of attention are divided among the ranks of tensor parallel; got {width // head} of {name}, "
            f"each of {head} features, and {size} ranks. Use a tp_size that divides them, or a plan without attention."
        )


def _check_packed(name: str, style: ParallelStyle) -> None:
    """Refuse to give each rank a run of columns that are several products: it would get the wrong ones, unnoticed."""
    if type(style) is ColwiseParallel and _stays_split(style) and _PACKED.search(name.rpartition(".")[2]):
        raise PreparationError(
            f"Columns that belong to several products would be mixed up; got {name}, whose name says that it holds "
            'some one after the other. Name it in the plan as "colwise_gather_output", or use a style of your own.'
        )


def _stays_split(style: ParallelStyle) -> bool:
    """Return whether what lies beside a cut, the output of columns or the input of rows, is a part on each rank."""
    if isinstance(style, ColwiseParallel):
        return not any(layout.is_replicate() for layout in style.output_layouts)
    return isinstance(style, RowwiseParallel) and not any(layout.is_replicate() for layout in style.input_layouts)


def _cut(module: nn.Module, style: ParallelStyle | None) -> tuple[str, int] | None:
    return next((cut for (kind, how), cut in _CUT.items() if isinstance(module, kind) and type(style) is how), None)


def _ties(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> Iterator[tuple[str, ...]]:
    """Yield the names of parameters that stand in several modules, of which some are split.

    Raises:
        PreparationError: Not all of them are split in the same way: each would train a weight of its own.
    """
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((name, module, own))
    for held in places.values():
        if len(held) < 2 or not any(name in styles for name, _, _ in held):
            continue
        cuts = [_cut(module, styles.get(name)) for name, module, _ in held]
        names = tuple(f"{name}.{own}" if name else own for name, _, own in held)
        if None in cuts or len({cut[1] for cut in cuts if cut is not None}) > 1:
            raise PreparationError(
                "A parameter that several modules share is split in the same way in all of them; got "
                f"{', '.join(names)}. Name all of these modules in the plan with styles that cut the same dimension, "
                "or none of them."
            )
        yield names
