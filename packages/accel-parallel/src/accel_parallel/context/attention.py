"""Attention of this rank's queries over a sequence that several ranks share, in place of torch's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel_core.errors import EngineUnavailableError
from accel_parallel.context.exchange import gather_keys_and_values
from accel_parallel.context.masks import causal_mask, lacks_keys, own_rows
from accel_parallel.context.order import Share

sdpa = torch.nn.functional.scaled_dot_product_attention
"""torch's own attention, whatever takes its place."""


class AttentionCall(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class Attention(ABC):
    """What a context block computes in place of `scaled_dot_product_attention`; the call has its arguments.

    Args:
        group: The ranks that share the sequence.
        share: This rank's part of it.
    """

    def __init__(self, group: dist.ProcessGroup, share: Share) -> None:
        self.group = group
        self.share = share

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries over all keys.

        Raises:
            EngineUnavailableError: Something that this way to compute it cannot honor.
        """
        self.check(query, key, attn_mask, is_causal)
        return self.attend(AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention of a call that `check` found right.

        Args:
            call: The arguments of the call, split along the sequence.
        """

    def check(self, query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool) -> None:
        """Refuse keys that are not this rank's part of the sequence, and two masks at once.

        Args:
            query: Queries of shape (..., tokens, size of a head).
            key: Keys of the same kind.
            attn_mask: The mask, or None for no mask.
            is_causal: Whether each query attends only to keys up to its own position.

        Raises:
            EngineUnavailableError: Nobody knows where in the sequence the keys are, or the queries of a causal mask.
        """
        own = self.share.local_length
        queries, keys = query.shape[-2], key.shape[-2]
        if keys != own or (is_causal and queries != own):
            raise EngineUnavailableError(
                f"A context-parallel block attends to the tokens that it splits, {own} for each rank; got "
                f"{'causal ' * is_causal}attention of {queries} queries to {keys} keys, whose positions in the "
                "sequence are unknown. Train this model without context parallel."
            )
        if is_causal and attn_mask is not None:  # torch refuses both as well
            raise EngineUnavailableError(
                "Attention has a mask or is causal; got is_causal=True beside a mask. Put both in one mask."
            )


class GatheredAttention(Attention):
    """Gathers the keys and values of all ranks, and attends to them under any mask."""

    def __init__(self, group: dist.ProcessGroup, share: Share) -> None:
        super().__init__(group, share)
        self._causal: dict[tuple[int, int], torch.Tensor] = {}  # the layers of a model ask for the same

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention of this rank's queries over all keys."""
        query, key, value = (_as_autocast(tensor) for tensor in (call.query, call.key, call.value))
        mask, queries, keys = call.mask, query.shape[-2], key.shape[-2]
        if mask is not None and lacks_keys(mask, keys):
            raise EngineUnavailableError(
                "Under context parallel a mask that differs between queries has to say which of all keys each may see; "
                "got one of this rank's own tokens alone. Make the mask for the whole sequence before the block, and "
                "pass it whole, or as a buffer that is split along its queries."
            )
        all_keys, all_values = gather_keys_and_values(self.group, key, value)
        rest: dict[str, Any] = {"dropout_p": call.dropout_p, "scale": call.scale, "enable_gqa": call.enable_gqa}
        if call.is_causal:
            return self._attend_causally(query, all_keys, all_values, rest)
        if mask is None:
            return sdpa(query, all_keys, all_values, **rest)
        mask = own_rows(mask, queries, keys, self.share, self.group)
        return sdpa(query, all_keys, all_values, attn_mask=mask, **rest)

    def _attend_causally(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rest: dict[str, Any]
    ) -> torch.Tensor:
        """Attend with each piece of this rank's queries to the keys up to its end, and to no others."""
        found: list[torch.Tensor] = []
        # What comes after a piece costs nothing.
        for piece, own in zip(self.share.pieces, query.chunk(2, -2), strict=True):
            mask: Any = self._causal_mask(own.shape[-2], piece.stop, query.device)
            seen = slice(0, piece.stop)
            found.append(sdpa(own, keys[..., seen, :], values[..., seen, :], attn_mask=mask, **rest))
        return torch.cat(found, -2)

    def _causal_mask(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """Return a mask of the last queries; accelerators have kernels that need not read one."""
        if device.type != "cpu":
            # Imported late: it loads torch's compiler, which takes seconds.
            from torch.nn.attention.bias import causal_lower_right

            bias: torch.Tensor = causal_lower_right(queries, keys)
            return bias
        if (queries, keys) not in self._causal:
            self._causal[queries, keys] = causal_mask(queries, keys, device)
        return self._causal[queries, keys]


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the format in which autocast would have attention compute, so that fewer bytes are sent."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:  # which autocast leaves alone
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor
