"""Batches in parts: how each is divided, what each part counts, and how what comes out is put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from accel_core.errors import DataError, StateError
from accel_parallel.pipeline.flow import Leaf, Outputs

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a model."""

_IGNORED = -100
"""The label that losses leave out, by default in torch and in transformers."""


class Losses(dict[str, torch.Tensor]):
    """What a pipeline returns in training: its loss, as `outputs.loss`, `outputs["loss"]` or `outputs[0]`."""

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return the loss."""
        if name == "loss":
            return self[name]
        raise AttributeError(f"A model in a pipeline returns its loss alone in training; got .{name}. {_REST}")

    def __missing__(self, key: object) -> torch.Tensor:
        if key == 0:
            return self["loss"]
        raise StateError(f"A model in a pipeline returns its loss alone in training; got [{key!r}]. {_REST}")


_REST = "Call the model under torch.no_grad() for the rest."


def shapes(batch: Call) -> tuple[Any, ...]:
    """Return what is equal for batches that make a model compute alike."""
    leaves, structure = tree_flatten(batch)
    described = [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)[:200] for leaf in leaves
    ]
    return (str(structure), *described)


def divide(batch: Call, parts: int, *, equal: bool) -> tuple[list[Call], list[int]]:
    """Divide a batch along the first dim of its tensors; a tensor with one row there goes into every part.

    Returns the parts, and the number of samples of each.
    """
    leaves, structure = tree_flatten(batch)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    size = max(sizes, default=0)
    odd = sorted({each for each in sizes if each not in (1, size)})
    if not size or odd or (equal and size % parts):
        raise DataError(
            f"A pipeline divides each batch into {parts} equal micro-batches along the first dim of its tensors; got "
            f"{', '.join(map(str, [size, *odd])) if size else 'no'} rows. Change the batch size, drop_last, or "
            "microbatches of PipelineKwargs."
        )
    rows = [each.tolist() for each in torch.arange(size).chunk(parts)]
    counts = [len(each) for each in rows]
    lists = [each for each in (*batch[0], *batch[1].values()) if isinstance(each, list) and len(each) == size]
    if lists and len(counts) > 1:
        raise DataError(
            f"A pipeline divides tensors, and gives all else to every micro-batch; got a list as long as the batch, of "
            f"{size} times {type(lists[0][0]).__name__}. Pass a tensor, or a tuple if it does not belong to samples."
        )
    divided = [
        torch.split(leaf, counts)
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size
        else [leaf] * len(counts)
        for leaf in leaves
    ]
    return [tree_unflatten([each[part] for each in divided], structure) for part in range(len(counts))], counts


def weights(model: torch.nn.Module, named: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> list[float]:
    """Return what the loss of each part counts, so that they add up to the loss of the whole batch.

    A loss is a mean over samples, or over labels that are not -100. Where the caller says over how many labels losses
    are divided, each part has its share already.
    """
    if named[0].get("num_items_in_batch") is not None:
        return [1.0] * len(counts)
    labels = [each.get("labels") for each in named]
    found = [each for each in labels if isinstance(each, torch.Tensor) and not each.is_floating_point()]
    counted: Sequence[float] = counts
    if len(found) == len(counts) and any(bool((each == _IGNORED).any()) for each in found):
        if _shifts(model):  # the first label of a sequence has nothing before it
            found = [each[..., 1:] for each in found]
        counted = torch.stack([(each != _IGNORED).sum() for each in found]).tolist()
    if not all(counted):
        raise DataError(
            "Each micro-batch of a pipeline has a label that counts; got one in which all labels are -100. Mix the "
            "samples, use fewer micro-batches, or pass num_items_in_batch to the model."
        )
    return [each / sum(counted) for each in counted]


def _shifts(model: torch.nn.Module) -> bool:
    """Return whether a model of transformers compares each token with the next one's label."""
    causal = getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    return causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def loss_in(outputs: object) -> torch.Tensor | None:
    """Return the loss in what a model returned, if there is one."""
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list):
        found = outputs[0] if outputs else None
    else:
        found = getattr(outputs, "loss", outputs)
    return found if isinstance(found, torch.Tensor) and not found.dim() else None


def joined(
    outputs: Sequence[Outputs], parts: Sequence[Sequence[Any]], shares: Sequence[float], counts: Sequence[int]
) -> Any:
    """Put together what a model returned for parts: rows one after the other, means of scalars, None where it is not.

    All ranks look at the shapes in `outputs`, so that none goes on alone.
    """
    made: list[Any] = []
    for place, leaf in enumerate(outputs[0].leaves):
        own = [part[place] for part in parts]
        if not isinstance(leaf, Leaf):
            made.append(leaf)
        elif not leaf.shape:
            made.append(sum(value * share for value, share in zip(own, shares, strict=True)))
        elif any(each.leaves[place].shape[0] != count for each, count in zip(outputs, counts, strict=True)):
            raise DataError(
                "What a pipeline returns for micro-batches has a row for each sample, or is a scalar; got a tensor of "
                f"shape {leaf.shape} for {counts[0]} samples. Return no such tensor."
            )
        else:
            made.append(None if own[0] is None else torch.cat(own))
    return tree_unflatten(made, outputs[0].structure)
