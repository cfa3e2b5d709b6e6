"""Cross entropy of a head's logits, which exist for some tokens at a time, and for a rank's part of the head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from accel_core._torch import has_forward_hooks
from accel_core.errors import DataError, PreparationError, StateError
from accel_core.mesh.tensor import is_spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import DTensor

__all__ = [
    "LEAST",
    "SHARDED",
    "add_product",
    "apply_to_head",
    "apply_where_asked",
    "ask",
    "asked_head",
    "linear_cross_entropy",
    "logits_of",
]

_How = tuple[int, dist.ProcessGroup | None, int, float | None, int]
"""The first row, the group that shares rows out, the label that does not count, the soft cap, and the chunk."""
LEAST = 64  # tokens whose logits exist at a time, at least
SHARDED, _ASKED = "_accel_sharded_loss", "_accel_chunk_logits"
"""Names of what computes the loss of a head that is sharded on its own, and of what was asked for before `prepare`."""


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    ignore_index: int,
    reduction: Literal["mean", "sum"],
    softcap: float | None,
    chunk: int | None,
) -> Tensor:
    """Return the loss; see `Accelerator.linear_cross_entropy`."""
    weight, bias = cast(Tensor, head.weight), cast("Tensor | None", head.bias)
    # An error would wait for a device; tensors without data and compiled graphs have no values to look at.
    known = labels.device.type == "cpu" and type(labels) is Tensor and not torch.compiler.is_compiling()
    lost = _lost(hidden, weight, labels, ignore_index, known)
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    sharded: Callable[..., Tensor] | None = getattr(head, SHARDED, None)
    if sharded is None:
        total = _total(rows, weight, bias, wanted, ignore_index, softcap, chunk)
    else:
        total = sharded(head, rows, wanted, ignore_index, softcap, chunk)
    if not known:
        total = total.masked_fill(lost.any(), torch.nan)
    # Where all labels are ignored, nothing is learned; a mean of none would be NaN.
    return total if reduction == "sum" else total / (wanted != ignore_index).sum().clamp(min=1)


def _total(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Tensor,
    ignore_index: int,
    softcap: float | None,
    chunk: int | None,
) -> Tensor:
    """Return the sum of losses, of a head that is whole or whose rows tensor parallel shares out."""
    start, group = 0, cast("dist.ProcessGroup | None", None)
    if is_spread(weight):
        start, group = _place(cast("DTensor", weight))
        weight, bias = (None if each is None else cast(Any, each).to_local() for each in (weight, bias))  # type: ignore[assignment]
    size = chunk or max(LEAST, rows.numel() // max(1, len(weight)))
    if torch.is_autocast_enabled(rows.device.type):
        rows, weight = (each.to(torch.get_autocast_dtype(rows.device.type)) for each in (rows, weight))
    total: Tensor
    options = getattr(nn, "LinearCrossEntropyOptions", None)  # from torch 2.13 on
    # In half precision torch adds losses up in that.
    exact = rows.dtype == weight.dtype and rows.dtype.itemsize >= torch.float32.itemsize
    alone = exact and group is None and softcap is None and type(rows) is Tensor
    if options is not None and alone:
        total = functional.linear_cross_entropy(
            rows,
            weight,
            wanted,
            linear_bias=bias,
            reduction="sum",
            ignore_index=ignore_index,
            options=options(batch_chunk_size=size),
        )
    else:
        how = start, group, ignore_index, softcap, size
        total = _Chunked.apply(rows, weight, bias, wanted, how)  # type: ignore[no-untyped-call]
    return total


def _lost(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, known: bool) -> Tensor:
    """Return for each label whether it is wrong; refuse what has no loss, and labels whose values are known."""
    if weight.dim() != 2:
        raise StateError(
            "The weight of a head is a matrix while its loss is computed; got one of shape "
            f"{tuple(weight.shape)}, as engines keep weights outside of a layer's own forward. Leave the head to the "
            "model's outermost shard, or compute the loss from logits."
        )
    if hidden.shape[:-1].numel() != labels.numel():
        raise StateError(
            f"Each token has one label; got hidden states of shape {tuple(hidden.shape)} and labels of shape "
            f"{tuple(labels.shape)}. Shift and cut both in the same way before."
        )
    lost = ((labels < 0) | (labels >= len(weight))) & (labels != ignore_index)
    if known and lost.any():
        raise DataError(
            f"A label is a row of the head, from 0 to {len(weight) - 1}, or {ignore_index} where none counts; got "
            f"{int(labels[lost][0])}. Correct the labels, or pass ignore_index."
        )
    return lost


def _place(weight: DTensor) -> tuple[int, dist.ProcessGroup]:
    """Return which row of the vocabulary is this rank's first, and the group of ranks that hold the others."""
    cut = [axis for axis, placement in enumerate(weight.placements) if not placement.is_replicate()]
    names = weight.device_mesh.mesh_dim_names or ()
    if len(cut) != 1 or not weight.placements[cut[0]].is_shard(0) or names[cut[0] : cut[0] + 1] != ("tp",):
        raise StateError(
            "A head's rows are whole, or shared out by tensor parallel, where its loss is computed; got a weight with "
            f"{weight.placements} on the axes {names}. Compute the loss inside of the model's forward, where shards "
            "are gathered, and name the head in the plan as colwise."
        )
    (axis,), mesh = cut, weight.device_mesh
    return mesh.get_local_rank(axis) * -(-len(weight) // mesh.size(axis)), mesh.get_group(axis)


def logits_of(rows: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return logits in 32 bits at least, and the slope of their soft cap where they have one."""
    logits = functional.linear(rows, weight, None if bias is None else bias.to(weight.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is None:
        return logits, None
    logits = logits.div_(softcap).tanh_()
    slope = 1 - logits.square()
    return logits.mul_(softcap), slope


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices, which has memory of its own only where it is added up in another number format."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    else:
        into.add_(left @ right)


class _Chunked(torch.autograd.Function):
    """The sum of losses; gradients are computed with it, so that logits of a few tokens exist at a time, and once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How) -> Tensor:
        """Return the sum, and keep the gradients that it has for a gradient of one."""
        start, group, ignored, softcap, size = how
        total = rows.new_zeros((), dtype=torch.float32)
        towards, of_weight, of_bias = (
            torch.zeros_like(each) if each is not None and ctx.needs_input_grad[place] else None
            for place, each in enumerate((rows, weight, bias))
        )
        for first in range(0, len(rows), size):
            part, label = rows[first : first + size], labels[first : first + size]
            logits, slope = logits_of(part, weight, bias, softcap)
            top = logits.amax(-1)
            if group is not None:
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            counts = label != ignored
            here = counts & (label >= start) & (label < start + len(weight))
            place = (label - start).clamp(0, len(weight) - 1)[:, None]
            found = logits.sub_(top[:, None]).gather(-1, place)[:, 0] * here
            sums = torch.stack([logits.exp_().sum(-1), found])
            if group is not None:
                dist.all_reduce(sums, group=group)
            total += ((sums[0].log() - sums[1]) * counts).sum()
            logits.div_(sums[0][:, None]).scatter_add_(-1, place, -here[:, None].to(logits.dtype)).mul_(counts[:, None])
            slopes = (logits if slope is None else logits.mul_(slope)).to(weight.dtype)
            if towards is not None:
                torch.mm(slopes, weight, out=towards[first : first + size])
            if of_weight is not None:
                of_weight.addmm_(slopes.T, part)
            if of_bias is not None:
                of_bias += slopes.sum(0)
            del logits, slopes, slope  # or the next ones would be made while these exist
        if group is not None and towards is not None:
            dist.all_reduce(towards, group=group)
        ctx.save_for_backward(towards, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place, so that they have no memory twice; a second pass is refused by torch."""
        return *(None if each is None else each.mul_(gradient) for each in ctx.saved_tensors), None, None


class _Switch:
    """Lets a model of transformers compute its loss from what enters its head, in calls that have labels."""

    def __init__(self, model: nn.Module, head: nn.Module, chunk: int | None) -> None:
        self._model, self._head, self._chunk = model, head, chunk
        self._plain, self.is_on = head.forward, False
        self._entered: Tensor | None = None
        self._config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._softcap: float | None = None

    def before(self, _: object, args: object, kwargs: dict[str, Any]) -> None:
        """Look whether the call has labels, and leave a soft cap to the loss."""
        self.is_on = kwargs.get("labels") is not None
        if self.is_on and hasattr(self._config, "final_logit_softcapping"):
            self._softcap, self._config.final_logit_softcapping = self._config.final_logit_softcapping, None

    def after(self, _: object, args: object, output: object) -> None:
        """Return no logits, as there are none."""
        if self.is_on and hasattr(self._config, "final_logit_softcapping"):
            self._config.final_logit_softcapping = self._softcap
        if self.is_on and isinstance(output, dict):
            output["logits"] = None
        self.is_on, self._entered = False, None

    def head(self, hidden: Tensor) -> Tensor:
        """Return what enters the head."""
        return hidden if self.is_on else self._plain(hidden)

    def keep(self, _: object, args: object, output: Tensor) -> None:
        """Note what leaves the head."""
        self._entered = output

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return the loss of the next tokens, as transformers' own."""
        weight = cast(Tensor, self._head.weight)
        if logits is not self._entered or (weight.dim() == 2 and logits.shape[-1] != weight.shape[1]):
            raise StateError(
                f"Logits go from a head to the loss as they are; got {type(self._model).__name__}, which changes them "
                "in between. Call accelerator.linear_cross_entropy in a forward of your own."
            )
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        whole = num_items_in_batch is None
        loss = linear_cross_entropy(
            logits,
            self._head,
            shift_labels.to(logits.device),
            ignore_index=ignore_index,
            reduction="mean" if whole else "sum",
            softcap=self._softcap,
            chunk=self._chunk,
        )
        return loss if whole else loss / torch.as_tensor(num_items_in_batch, device=loss.device)


class _Unhooked:
    """Mixed into the class of a head that is sharded on its own: hooks of its calls would gather it for nothing."""

    _accel_switch: _Switch

    def __call__(self, hidden: Tensor) -> Tensor:
        if not self._accel_switch.is_on:
            return super().__call__(hidden)  # type: ignore[misc, no-any-return]
        self._accel_switch.keep(self, (), hidden)
        return hidden


def ask(model: nn.Module, chunk: int | None) -> None:
    """Let a bare model of transformers compute its loss this way once it is prepared."""
    _head_of(model)
    model.__dict__[_ASKED] = chunk


def asked_head(model: nn.Module) -> nn.Module | None:
    """Return the head of a model that is to compute its loss this way once it is prepared."""
    return _head_of(model) if _ASKED in model.__dict__ else None


def apply_where_asked(model: nn.Module) -> None:
    """Do for a bare model that was just prepared what was asked for before."""
    if _ASKED in model.__dict__:
        apply_to_head(model, model.__dict__.pop(_ASKED))


def _head_of(model: nn.Module) -> nn.Module:
    """Return the head of a causal language model of transformers; refuse others."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    loss = getattr(model, "loss_function", None)
    if not isinstance(head, nn.Module) or getattr(loss, "__name__", "") != "ForCausalLMLoss":
        raise PreparationError(
            "The head of a causal language model of transformers computes its loss by parts; got a "
            f"{type(model).__name__}. Call accelerator.linear_cross_entropy in its forward."
        )
    return head


def apply_to_head(model: nn.Module, chunk: int | None) -> None:
    """Let a bare model of transformers compute its loss this way; see `Accelerator.chunk_logits`."""
    head = _head_of(model)
    switch = _Switch(model, head, chunk)
    model.register_forward_pre_hook(switch.before, with_kwargs=True)
    model.register_forward_hook(switch.after, always_call=True, prepend=True)  # before hooks that warn of views
    if hasattr(head, SHARDED) and not has_forward_hooks(head, others=1):  # one is of sharding
        kind = type(head)
        own = {"__module__": kind.__module__, "_accel_switch": switch}
        head.__class__ = type(kind.__name__, (_Unhooked, kind), own)
    else:
        head.forward = switch.head
        head.register_forward_hook(switch.keep)
    model.loss_function = switch.loss  # type: ignore[assignment]
