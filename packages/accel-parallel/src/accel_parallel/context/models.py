"""What models of transformers make from their inputs (masks, positions, labels), for a sequence that is split.

Such a model derives masks from the lengths and values of its inputs, which hold this rank's part of the sequence. So
its inputs are completed before its forward pass: it is given the mask that it would have made of the whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_core.errors import EngineUnavailableError, PreparationError
from accel_core.host.availability import imported
from accel_parallel.context.exchange import gather_whole
from accel_parallel.context.order import Share


def check_attention(model: nn.Module) -> None:
    """Refuse a model whose attention is not torch's `scaled_dot_product_attention`."""
    for name, module in model.named_modules():
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(kind, str) and kind != "sdpa":
            raise PreparationError(
                "Context parallel sends scaled_dot_product_attention over all ranks, and no other attention; got "
                f"attn_implementation={kind!r} in {name or type(module).__name__}. "
                'Load the model with attn_implementation="sdpa".'
            )


def find_model(model: nn.Module) -> nn.Module | None:
    """Return the first module that takes transformers' mask and positions, `model` or one inside it, or `None`."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            # The outermost module; what it makes goes to those inside.
            names = inspect.signature(module.forward).parameters
            if {"attention_mask", "position_ids"} <= set(names):
                return module
    return None


class CompleteInputs:
    """A forward pre-hook that gives a model of transformers the mask of the whole sequence."""

    def __init__(self, group: dist.ProcessGroup, now: Callable[[], Share | None], compiled: bool) -> None:
        self.group = group
        self.now = now
        self.compiled = compiled

    def __deepcopy__(self, memo: dict[int, Any]) -> CompleteInputs:
        return self  # a copy of a model trains in the same run

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a forward pass, completed."""
        share = self.now()
        if share is None:
            return None
        given = _named(module, args, kwargs)
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if tokens is None or tokens.shape[1] != share.local_length:
            return None  # nothing of the split sequence; attention refuses what it cannot tell
        self._check_labels(module, given)
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if positions is None or positions.shape[-1] != share.local_length:
            raise EngineUnavailableError(
                "Under context parallel a model cannot know the positions of its tokens; got position_ids="
                f"{None if positions is None else tuple(positions.shape)} for tokens of shape {tuple(tokens.shape)}. "
                "Pass position_ids, such as torch.arange(length)[None], and split them with the other buffers."
            )
        # Others are what attention takes, whole.
        if mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            given["attention_mask"] = self._complete(module, given, tokens, share)
        return (), given

    def _check_labels(self, module: nn.Module, given: dict[str, Any]) -> None:
        """Refuse labels that the model would shift within each rank's part."""
        shifts = getattr(module, "loss_type", None) == "ForCausalLM" and given.get("labels") is not None
        if shifts and given.get("shift_labels") is None:
            raise EngineUnavailableError(
                "Under context parallel a language model would shift labels within each rank's part; got labels "
                "without shift_labels. Pass shift_labels=shift_labels(labels), of accel_parallel.context, made "
                "before the block and split with the other buffers."
            )

    def _complete(self, module: Any, given: dict[str, Any], tokens: torch.Tensor, share: Share) -> Any:
        """Return what makes the model attend as it would with the whole sequence."""
        mask: Any = given.get("attention_mask")
        positions: torch.Tensor = given["position_ids"]
        if mask is not None and mask.shape[-1] == share.local_length:
            mask = gather_whole(self.group, mask, -1)
        cached = given.get("use_cache")
        cached = getattr(module.config.get_text_config(), "use_cache", False) if cached is None else cached
        # A model with a cache does not look for packed documents, and one without finds them by their positions.
        whole_positions = None if cached else gather_whole(self.group, positions, -1)
        causal = any(getattr(part, "is_causal", False) is True for part in module.modules())
        if not causal:
            # Without a mask, torch can take its faster kernels.
            return None if mask is None or bool(mask.all()) else mask.bool()[:, None, None, :]
        masks = self._masks(module, tokens, mask, whole_positions, share)
        if masks is None and not self.compiled:
            # Without one, positions that jump from head to tail would look like those of packed documents.
            return torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        if masks is None:
            return _causal_rows(share, tokens.device)
        if isinstance(masks, dict):
            return {kind: one if one is None else share.of(one, 2) for kind, one in masks.items()}
        return share.of(masks, 2)

    def _masks(
        self,
        module: Any,
        tokens: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        share: Share,
    ) -> Any:
        """Return the masks that transformers makes for the whole sequence; `None` where a causal one is enough.

        Raises:
            EngineUnavailableError: The installed transformers cannot be asked, or does not know for this model.
        """
        make = imported("transformers.masking_utils:create_masks_for_generate")
        masks: Any = mask
        if make is not None:
            # Only its shape, dtype and device are read.
            like = torch.empty(tokens.shape[0], share.length, 1, dtype=module.dtype, device=tokens.device)
            masks = make(module.config, like, mask, None, position_ids=positions)
        if make is None or (isinstance(masks, torch.Tensor) and masks.dim() != 4):
            raise EngineUnavailableError(
                "Under context parallel the mask of a model of transformers is made for the whole sequence; the "
                f"installed transformers does not make one for {type(module).__name__}. "
                "Pass a mask of shape (batch, 1, length, length) as attention_mask."
            )
        if isinstance(masks, dict) and all(one is None for one in masks.values()):
            return None
        return masks


def _causal_rows(share: Share, device: torch.device) -> torch.Tensor:
    """Return the causal mask of this rank's tokens, of shape (1, 1, tokens, length)."""
    every = torch.arange(share.length, device=device)
    return (every[None, :] <= share.of(every, 0)[:, None])[None, None]


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a forward pass by name."""
    signature = inspect.signature(module.forward)
    found = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found
