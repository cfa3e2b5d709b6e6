"""Splits batches into micro batches, in the form that megatron-core's models expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accel_core.comm.batch import send_to_device
from accel_core.errors import DataError
from accel_megatron import library
from accel_megatron.run import MegatronRun

IGNORED = -100
"""The label of tokens that are left out of the loss, as in transformers."""

Batch = Mapping[str, Any]


def check(run: MegatronRun, batch: Batch) -> int:
    """Return the number of samples in a batch.

    Raises:
        DataError: There is no tensor, the batch does not split into micro batches, or its sequences do not fit the
            run.
    """
    rows = {name: len(value) for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    parts = run.plugin.num_micro_batches or 1
    if not rows or len(set(rows.values())) > 1:
        raise DataError(f"A batch needs tensors with one row per sample; got {rows or 'none'}. Call model(**batch).")
    samples = next(iter(rows.values()))
    if samples == 0 or samples % parts:
        raise DataError(
            f"A batch is split into num_micro_batches={parts} equal parts; got {samples} samples on this rank. Use a "
            "batch size that is a multiple of it, and drop_last=True."
        )
    _check_lengths(run, batch)
    return samples


def _check_lengths(run: MegatronRun, batch: Batch) -> None:
    longest = run.arguments.max_position_embeddings
    # It splits activations along the tokens.
    cut = (run.plugin.tp_degree or 1) if run.arguments.sequence_parallel else 1
    context = run.plugin.context_parallel_size or 1
    parts = cut * (2 * context if context > 1 else 1)  # a rank has one chunk from each end, for equal causal work
    learned = run.arguments.position_embedding_type == "learned_absolute"  # only a table of positions has an end
    for name in ("input_ids", "tokens", "labels", "decoder_input_ids"):
        value = batch.get(name)
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            continue
        length = value.shape[1]
        if (learned and length > longest) or length % parts:
            raise DataError(
                f"A sequence length has to be a multiple of {parts}, at most {longest}; got {name} of {length} "
                "tokens. Pad or truncate them in the collate function."
            )


def micro_batches(run: MegatronRun, batch: Batch) -> Iterator[dict[str, Any]]:
    """Yield the micro batches of a batch, on the device."""
    parts = run.plugin.num_micro_batches or 1
    moved = send_to_device(dict(batch), run.device)
    size = len(next(value for value in moved.values() if isinstance(value, torch.Tensor) and value.ndim)) // parts
    for index in range(parts):
        rows = slice(index * size, (index + 1) * size)
        yield {
            name: value[rows] if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in moved.items()
        }


def gpt_batch(run: MegatronRun, data: Batch, *, from_megatron: bool) -> tuple[Any, ...]:
    """Return tokens, labels, loss mask, attention mask and positions of a micro batch of a GPT."""
    if from_megatron:
        tokens, labels = data["tokens"], data["labels"]
        loss_mask = data.get("loss_mask", torch.ones_like(labels)).float()
        positions = data.get("position_ids", _positions(tokens))
    else:
        tokens = data["input_ids"]
        labels, loss_mask = _shifted(run, data)
        positions = data.get("position_ids", _positions(tokens))
    found = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
    if (run.plugin.context_parallel_size or 1) > 1:
        found = library.core("utils").get_batch_on_this_cp_rank(found)  # in megatron-core's order of chunks
    # Without an explicit mask, megatron-core's attention is causal.
    mask = data.get("attention_mask") if from_megatron else None
    return found["tokens"], found["labels"], found["loss_mask"], mask, found["position_ids"]


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)


def _shifted(run: MegatronRun, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next token of each token, and which of them count: transformers shifts labels in the model.

    Raises:
        DataError: Sequences that are padded on the left, which a causal mask alone does not hide.
    """
    tokens, mask = data["input_ids"], data.get("attention_mask")
    labels = data.get("labels")
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):  # a 1 after a 0: padding on the left
        raise DataError(
            "Megatron's GPT masks padding only at the end of sequences; got an attention_mask with padding before "
            "tokens. Set tokenizer.padding_side='right'."
        )
    if labels is None:
        labels = tokens if mask is None else tokens.masked_fill(mask == 0, IGNORED)
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    counts = following != IGNORED
    if run.plugin.eod_mask_loss:
        counts &= tokens != _end_of_document(run)
    # Megatron-core looks up every label, even those that the loss mask leaves out.
    return following.masked_fill(following == IGNORED, 0), counts.float()


def _end_of_document(run: MegatronRun) -> int:
    arguments = run.arguments
    end = arguments.eos_token_id if arguments.eod_token_id is None else arguments.eod_token_id
    if end is None:
        raise DataError(
            "eod_mask_loss needs the token that ends a document; got a model configuration without eos_token_id. Set "
            "eod_token_id in other_megatron_args."
        )
    return int(end)


def bert_batch(data: Batch, *, from_megatron: bool) -> tuple[Any, ...]:
    """Return tokens, types, label of the sentence, loss mask, labels and padding mask of a micro batch of a BERT."""
    if from_megatron:
        found = {name: data[name] for name in ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")}
        return (*(found[name] for name in ("text", "types", "is_random")), found["loss_mask"].float(),
                found["labels"], found["padding_mask"])  # fmt: skip
    tokens = data["input_ids"]
    labels = data["labels"]
    loss_mask = (labels != IGNORED).float()
    padding = data.get("attention_mask", torch.ones_like(tokens))
    types = data.get("token_type_ids", torch.zeros_like(tokens))
    return tokens, types, data.get("next_sentence_label"), loss_mask, labels.masked_fill(labels == IGNORED, 0), padding


def t5_batch(run: MegatronRun, data: Batch, *, from_megatron: bool) -> tuple[Any, ...]:
    """Return the tokens of both sides, the loss mask, the labels and the three masks of a micro batch of a T5."""
    if from_megatron:
        names = ("text_enc", "text_dec", "loss_mask", "labels", "enc_mask", "dec_mask", "enc_dec_mask")
        encoder, decoder, loss_mask, labels, *stored = (data[name] for name in names)
        # Stored masks are 1 where a token may be attended to, megatron-core's are true where it is hidden.
        return encoder, decoder, loss_mask.float(), labels, *(mask < 0.5 for mask in stored)
    encoder, labels = data["input_ids"], data["labels"]
    padding = data.get("attention_mask", torch.ones_like(encoder))
    decoder = data.get("decoder_input_ids", _moved_right(run, labels))
    loss_mask = (labels != IGNORED).float()
    masks = (
        pair_mask(padding, padding),
        decoder_mask(decoder.shape[1], decoder.device).expand(len(decoder), 1, -1, -1),
        pair_mask(torch.ones_like(decoder), padding),
    )
    return encoder, decoder, loss_mask, labels.masked_fill(labels == IGNORED, 0), *masks


def _moved_right(run: MegatronRun, labels: torch.Tensor) -> torch.Tensor:
    """Return the decoder's inputs for given labels: the labels shifted right by one, as in transformers' T5."""
    start = run.arguments.decoder_start_token_id or 0
    pad = run.arguments.pad_token_id or 0
    moved = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=start)
    return moved.masked_fill(moved == IGNORED, pad)  # an ignored label is not a token of the vocabulary


def decoder_mask(length: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask of a decoder, of shape (1, 1, length, length): true where a token is hidden."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril().logical_not()


def pair_mask(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return which keys are hidden from which queries because they are padding, of shape (batch, 1, queries, keys)."""
    return (queries[:, :, None] * keys[:, None, :])[:, None] < 0.5
