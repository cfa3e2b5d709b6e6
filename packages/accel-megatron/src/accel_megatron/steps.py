"""Training steps for megatron-core's models: read a micro batch, run the model, compute the loss.

A step is the same for training and evaluation; `MegatronEngine` runs it through megatron-core's schedules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_megatron import batches
from accel_megatron.run import current

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""A summed loss, its number of tokens, and what is reported: by name, a tensor of both."""


class AbstractTrainStep(ABC):
    """One training step.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: object, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that reads the next micro batch of an iterator.

        Args:
            accelerator: The Accelerator of the run.
            megatron_dataset_flag: Whether batches come from a megatron-core dataset.
        """

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the forward step: takes an iterator and the model, returns the output and a loss function."""

    @abstractmethod
    def get_loss_func(self, accelerator: object) -> Callable[..., Any]:
        """Return the function that computes the loss from the model's output.

        Args:
            accelerator: The Accelerator of the run.
        """


class _TrainStep(AbstractTrainStep):
    """A training step whose functions are the plugin's where it has some, and the class's own otherwise."""

    def _choose(
        self, accelerator: object, args: Namespace, loss: Sequence[Any] = (), forward: Sequence[Any] = ()
    ) -> None:
        """Choose the functions."""
        plugin = current().plugin
        self.get_batch = plugin.custom_get_batch_function or self.get_batch_func(
            accelerator, bool(args.megatron_dataset_flag)
        )
        self.loss_func = plugin.custom_loss_function or self.get_loss_func(accelerator, *loss)
        self.forward_step = self.get_forward_step_func(*forward)


def _summed(loss_mask: torch.Tensor, losses: torch.Tensor) -> Loss:
    """Return the summed loss of a micro batch's tokens, and what is reported of it."""
    counts = loss_mask.reshape(-1).float()  # sums in 32 bits, whatever the model computes in
    total = torch.sum(losses.float().reshape(-1) * counts)
    tokens = counts.sum()
    reported = torch.stack([total.detach(), tokens])
    return total, tokens.to(torch.int), {"lm loss": reported}


class GPTTrainStep(_TrainStep):
    """The training step of a GPT."""

    def __init__(self, accelerator: object, args: Namespace) -> None:
        super().__init__("GPTTrainStep")
        self.returns_logits = bool(args.return_logits)
        self._choose(accelerator, args)

    def get_batch_func(self, accelerator: object, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that reads tokens, labels, loss mask, attention mask and positions of a micro batch."""

        def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
            return batches.gpt_batch(current(), next(data_iterator), from_megatron=megatron_dataset_flag)

        return get_batch

    def get_loss_func(self, accelerator: object) -> Callable[..., Any]:
        """Return the function that computes the loss from per-token losses, or from logits if they were requested."""

        def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Loss:
            losses, logits = output_tensor if isinstance(output_tensor, tuple) else (output_tensor, None)
            total, tokens, reported = _summed(loss_mask, losses)
            if logits is not None:
                reported["logits"] = logits.detach()
            return total, tokens, reported

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the forward step: takes an iterator and the model, returns the output and a loss function."""

        def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            if not self.returns_logits:
                output = model(tokens, position_ids, attention_mask, labels=labels)
                return output, partial(self.loss_func, loss_mask)
            output = model(tokens, position_ids, attention_mask)  # megatron-core returns losses or logits, not both
            return output, partial(_with_logits, self.loss_func, labels, loss_mask)

        return forward_step


def _with_logits(
    loss_func: Callable[..., Loss], labels: torch.Tensor, mask: torch.Tensor, logits: torch.Tensor
) -> Loss:
    """Return a loss and what is reported with it, including the logits, over the whole vocabulary."""
    flat = logits.float().reshape(-1, logits.shape[-1])
    losses = torch.nn.functional.cross_entropy(flat, labels.reshape(-1), reduction="none")
    return loss_func(mask, (losses.view_as(labels), logits))


class BertTrainStep(_TrainStep):
    """The training step of a BERT."""

    def __init__(self, accelerator: object, args: Namespace) -> None:
        super().__init__("BertTrainStep")
        self._choose(
            accelerator,
            args,
            loss=(args.pretraining_flag, args.num_labels),
            forward=(args.pretraining_flag, args.bert_binary_head),
        )

    def get_batch_func(self, accelerator: object, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that reads tokens, types, sentence label, loss mask, labels and padding mask."""

        def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
            return batches.bert_batch(next(data_iterator), from_megatron=megatron_dataset_flag)

        return get_batch

    def get_loss_func(  # type: ignore[override]
        self, accelerator: object, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Any]:
        """Return the function that computes the loss of masked tokens and, with a sentence label, of the sentence."""

        def loss_func(
            loss_mask: torch.Tensor,
            sentence_order: torch.Tensor | None,
            output_tensor: tuple[torch.Tensor, torch.Tensor | None],
        ) -> Loss:
            losses, binary = output_tensor
            total, tokens, reported = _summed(loss_mask, losses)
            if binary is not None and sentence_order is not None:
                order = torch.nn.functional.cross_entropy(binary.view(-1, 2).float(), sentence_order.view(-1))
                total = total + order * tokens
                reported["sop loss"] = torch.stack([order.detach() * tokens, tokens.to(order.dtype)])
            return total, tokens, reported

        return loss_func

    def get_forward_step_func(  # type: ignore[override]
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        """Return the forward step: takes an iterator and the model, returns the output and a loss function."""

        def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            tokens, types, sentence_order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, sentence_order)

        return forward_step


class T5TrainStep(_TrainStep):
    """The training step of a T5."""

    def __init__(self, accelerator: object, args: Namespace) -> None:
        super().__init__("T5TrainStep")
        self._choose(accelerator, args)

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return an encoder's pairwise attention mask, true where a token is hidden."""
        return batches.pair_mask(attention_mask, attention_mask)

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> torch.Tensor:
        """Return a decoder's pairwise attention mask, true where a token is hidden."""
        return batches.decoder_mask(seq_length, device)

    @staticmethod
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device) -> torch.Tensor:
        """Return the cross-attention mask from decoder to encoder tokens, true where a token is hidden."""
        keys = attention_mask.to(device)
        return batches.pair_mask(keys.new_ones(len(keys), dec_seq_length), keys)

    def get_batch_func(self, accelerator: object, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that reads both sides' tokens, the loss mask, the labels and the three masks."""

        def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
            return batches.t5_batch(current(), next(data_iterator), from_megatron=megatron_dataset_flag)

        return get_batch

    def get_loss_func(self, accelerator: object) -> Callable[..., Any]:
        """Return the function that computes the loss from per-token losses."""
        return _summed

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the forward step: takes an iterator and the model, returns the output and a loss function."""

        def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
            encoder, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
            output = model(encoder, decoder, *masks, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step
