"""Cross entropy of a head's logits, which exist for some tokens at a time, and for a rank's part of the head."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accel_core._torch import call_hooks
from accel_core.errors import DataError, PreparationError, StateError
from accel_core.mesh.tensor import is_spread, local_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import DTensor

_How = tuple[int, dist.ProcessGroup | None, int, float | None, int]
"""The first row, the group that shares rows out, the label that does not count, the soft cap, and the chunk."""
LEAST = 64  # tokens whose logits exist at a time, at least
SHARDED, _ASKED = "_accel_sharded_loss", "_accel_chunk_logits"
"""Names of what computes the loss of a head that is sharded on its own, and of what was asked for before `prepare`."""
_ENGINES = ("accel_bigmodel.", "accel_parallel.", "deepspeed.", "torch.distributed.", "torch.nn.parallel.")
"""Where hooks and classes come from by which ranks exchange weights around calls of a module."""


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
    if hidden.shape[:-1].numel() != labels.numel():
        raise StateError(
            f"Each token has one label; got hidden states of shape {tuple(hidden.shape)} and labels of shape "
            f"{tuple(labels.shape)}. Shift and cut both in the same way before."
        )
    wanted = labels.reshape(-1)
    compute = _computed if is_plain(head) else _called
    total = compute(head, hidden, wanted, ignore_index, softcap, chunk)
    # Where all labels are ignored, nothing is learned; a mean of none would be NaN.
    return total if reduction == "sum" else total / (wanted != ignore_index).sum().clamp(min=1)


def is_plain(head: nn.Module) -> bool:
    """Return whether the logits of a head follow from its weight and bias alone: no hook or forward changes them."""
    own = type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    return own and all(_is_of_engine(hook) for hook in call_hooks(head))


def _is_of_engine(part: object) -> bool:
    return str(part.__module__).startswith(_ENGINES)


def _called(
    head: nn.Module, hidden: Tensor, wanted: Tensor, ignore_index: int, softcap: float | None, chunk: int | None
) -> Tensor:
    """Return the sum of losses, of a head that is called: on some rows at a time, and once more for the gradients."""
    width = hidden.shape[-1]

    def loss(part: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = head(part.reshape(*(1,) * (hidden.dim() - 2), -1, width)).flatten(0, -2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        lost = _lost(labels, logits.shape[-1], ignore_index)
        labels = labels.masked_fill(lost, ignore_index)
        total = functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
        return total.masked_fill(lost.any(), torch.nan)

    rows = hidden.reshape(-1, width)
    # Ranks that exchange weights around each call make the same number of calls, whatever their numbers of tokens are.
    if any(_is_of_engine(part) for module in head.modules() for part in (type(module), *call_hooks(module))):
        return loss(rows, wanted)
    largest = max((each.numel() for each in head.parameters()), default=0)  # most likely has a row for each word
    size = chunk or max(LEAST, rows.numel() * width // max(1, largest))
    pairs = zip(torch.split(rows, size), torch.split(wanted, size), strict=True)
    return torch.stack([cast(Tensor, checkpoint(loss, *pair, use_reentrant=False)) for pair in pairs]).sum()


def _computed(
    head: nn.Module, hidden: Tensor, wanted: Tensor, ignore_index: int, softcap: float | None, chunk: int | None
) -> Tensor:
    """Return the sum of losses, of a head that is a weight and a bias."""
    weight, bias = cast(Tensor, head.weight), cast("Tensor | None", head.bias)
    if weight.dim() != 2:
        raise StateError(
            "The weight of a head is a matrix while its loss is computed; got one of shape "
            f"{tuple(weight.shape)}, as engines keep weights outside of a layer's own forward. Leave the head to the "
            "model's outermost shard, or compute the loss from logits."
        )
    rows, lost = hidden.reshape(-1, hidden.shape[-1]), _lost(wanted, len(weight), ignore_index).any()
    sharded: Callable[..., Tensor] | None = getattr(head, SHARDED, None)
    if sharded is not None:
        return sharded(head, rows, wanted, ignore_index, softcap, chunk).masked_fill(lost, torch.nan)
    start, group = 0, cast("dist.ProcessGroup | None", None)
    if is_spread(weight):
        start, group = _place(weight)
        weight, bias = local_part(weight), None if bias is None else local_part(bias)
    size = chunk or max(LEAST, rows.numel() // max(1, len(weight)))
    if torch.is_autocast_enabled(rows.device.type):
        rows, weight = (each.to(torch.get_autocast_dtype(rows.device.type)) for each in (rows, weight))
    how = start, group, ignore_index, softcap, size
    total: Tensor = _Chunked.apply(rows, weight, bias, wanted, how)  # type: ignore[no-untyped-call]
    return total.masked_fill(lost, torch.nan)


def _lost(labels: Tensor, words: int, ignore_index: int) -> Tensor:
    """Return for each label whether it is wrong; refuse labels whose values are known."""
    lost = ((labels < 0) | (labels >= words)) & (labels != ignore_index)
    # An error would wait for a device; tensors without data and compiled graphs have no values to look at.
    known = labels.device.type == "cpu" and type(labels) is Tensor and not torch.compiler.is_compiling()
    if known and lost.any():
        raise DataError(
            f"A label is a row of the head, from 0 to {words - 1}, or {ignore_index} where none counts; got "
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
        total = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
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


class _Entrance(nn.Module):
    """Takes the place of a head in calls that have labels: it passes on what enters."""

    entered: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Note what enters."""
        self.entered = hidden
        return hidden


class _Switch:
    """Lets a model of transformers compute its loss from what enters its head, in calls that have labels."""

    def __init__(self, base: Any, chunk: int | None) -> None:
        self._base, self._chunk, head = base, chunk, base.get_output_embeddings()
        (path, *_) = (name for name, module in base.named_modules() if module is head)
        owner, _, self._place = path.rpartition(".")
        self._modules = base.get_submodule(owner)._modules  # set there, as what joins a model is noted
        self._head: nn.Module | None = None
        self._entrance = _Entrance()
        self._config, self._softcap = base.config.get_text_config(), None

    def before(self, _: object, args: object, kwargs: dict[str, Any]) -> None:
        """Take the head, and the soft cap, out of a call that has labels."""
        self.after()  # of a call that was interrupted
        if kwargs.get("labels") is not None:
            self._head, self._modules[self._place] = self._modules[self._place], self._entrance
            self._softcap = getattr(self._config, "final_logit_softcapping", None)
            if self._softcap is not None:
                self._config.final_logit_softcapping = None

    def after(self, _: object = None, args: object = None, output: object = None) -> None:
        """Put them back, and return no logits, as there are none."""
        if self._head is None:
            return
        self._modules[self._place] = self._head
        if self._softcap is not None:
            self._config.final_logit_softcapping = self._softcap
        self._head = self._entrance.entered = None
        if isinstance(output, dict):
            output["logits"] = None

    def loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **given: Any) -> Tensor:
        """Return the loss of the next tokens, as transformers' own."""
        if self._head is None or logits is not self._entrance.entered:
            raise StateError(
                f"The loss needs the head's raw logits; got {type(self._base).__name__}, which modifies them. Call "
                "accelerator.linear_cross_entropy in a forward of your own."
            )
        ignored, shifted, items = (given.get(name) for name in ("ignore_index", "shift_labels", "num_items_in_batch"))
        how: dict[str, Any] = {"ignore_index": -100 if ignored is None else ignored, "softcap": self._softcap}
        if shifted is None:
            shifted = functional.pad(labels, (0, 1), value=how["ignore_index"])[..., 1:]
        how |= {"reduction": "mean" if items is None else "sum", "chunk": self._chunk}
        loss = linear_cross_entropy(logits, self._head, shifted.to(logits.device), **how)
        return loss if items is None else loss / torch.as_tensor(items, device=loss.device)


def ask(model: nn.Module, chunk: int | None) -> None:
    """Let a bare model of transformers compute its loss this way once it is prepared."""
    _checked_base_of(model).__dict__[_ASKED] = chunk


def asked_head(model: nn.Module) -> nn.Module | None:
    """Return the plain head of a model that is to compute its loss this way once it is prepared."""
    base = _base_of(model)
    head: nn.Module | None = base.get_output_embeddings() if _ASKED in base.__dict__ else None
    return head if head is not None and is_plain(head) else None


def apply_where_asked(model: nn.Module) -> None:
    """Do for a bare model that was just prepared what was asked for before."""
    asked = _base_of(model).__dict__
    if _ASKED in asked:
        apply_to_head(model, asked.pop(_ASKED))


def _base_of(model: nn.Module) -> Any:
    """Return the model inside one of PEFT, with its adapters, or the model itself."""
    return getattr(model, "get_base_model", lambda: model)()


def _checked_base_of(model: nn.Module) -> Any:
    """Return a causal language model of transformers; refuse others, and those that compute a loss of their own."""
    base = _base_of(model)
    head = getattr(base, "get_output_embeddings", lambda: None)()
    loss = getattr(base, "loss_function", None)
    calls_it = "loss_function" in inspect.unwrap(type(base).forward).__code__.co_names
    if not isinstance(head, nn.Module) or getattr(loss, "__name__", "") != "ForCausalLMLoss" or not calls_it:
        raise PreparationError(
            "The head of a causal language model of transformers computes its loss by parts; got a "
            f"{type(base).__name__}. Call accelerator.linear_cross_entropy in its forward."
        )
    return base


def apply_to_head(model: nn.Module, chunk: int | None) -> None:
    """Let a bare model of transformers compute its loss this way; see `Accelerator.chunk_logits`."""
    base = _checked_base_of(model)
    switch = _Switch(base, chunk)
    model.register_forward_pre_hook(switch.before, with_kwargs=True)
    model.register_forward_hook(switch.after, always_call=True, prepend=True)  # before hooks that warn of views
    base.loss_function = switch.loss
