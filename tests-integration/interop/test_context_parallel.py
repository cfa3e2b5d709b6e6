"""Models of transformers on two ranks that share each sequence: losses and weights are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from accel_core.accelerator import Accelerator
from accel_core.errors import EngineUnavailableError, PreparationError
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process.world import ensure
from accel_parallel.context import shift_labels
from accel_parallel.context.order import Share
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import world

BATCH, LENGTH = 2, 32
SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def model_of(kind: str, attention: str = "sdpa") -> Any:
    """Return a small model, the same on all ranks."""
    import transformers

    torch.manual_seed(0)
    if kind == "bert":
        sizes = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
        config: Any = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return transformers.BertForMaskedLM._from_config(config, attn_implementation=attention)
    if kind == "sliding":
        config = transformers.MistralConfig(**SMALL, sliding_window=20)
        return transformers.MistralForCausalLM._from_config(config, attn_implementation=attention)
    config = transformers.LlamaConfig(**SMALL, use_cache=kind != "packed")
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)


def inputs_of(kind: str, step: int) -> dict[str, torch.Tensor]:
    """Return a batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 40, (BATCH, LENGTH), generator=generator)
    places = torch.arange(LENGTH).repeat(BATCH, 1)
    given = {"input_ids": tokens, "position_ids": places}
    labels = shift_labels(tokens)
    if kind in ("padded", "padded, whole mask", "bert"):
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[0, :5] = 0
        mask[1, 20:] = 0
        given["attention_mask"] = mask
        labels = labels.masked_fill(mask == 0, -100)
    if kind == "packed":
        places[:] = torch.arange(LENGTH).remainder(LENGTH // 2)  # the first document ends where a rank's part does
    return given | {"labels": labels}


def loss_of(model: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss, and the number of tokens that count."""
    scores = model(**{name: value for name, value in given.items() if name != "labels"}).logits
    labels = given["labels"]
    loss = F.cross_entropy(scores.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


def alone(kind: str, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Train on one process."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(steps):
        loss, count = loss_of(model, inputs_of(kind, step))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach() / count))
    return losses, [parameter.detach() for parameter in model.parameters()]


def together(accelerator: Accelerator, kind: str, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Train on all ranks."""
    model, optimizer = model_of(kind), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(steps):
        given = inputs_of(kind, step)
        split = [value for name, value in given.items() if (kind, name) != ("padded, whole mask", "attention_mask")]
        with accelerator.maybe_context_parallel(split, [1] * len(split), set(split)):
            loss, count = loss_of(model, given)
            accelerator.backward(loss, weight=count)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(torch.stack([loss.detach(), count]), "sum")
        losses.append(float(total[0] / total[1]))
    state = accelerator.get_state_dict(model)
    return losses, [state[name] for name, _ in model_of(kind).named_parameters()] if state else []


def compare(accelerator: Accelerator, kind: str, steps: int) -> None:
    """Compare the two."""
    losses, weights = together(accelerator, kind, steps)
    expected_losses, expected = alone(kind, steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-5, atol=1e-6)
    for got, wanted in zip(weights, expected, strict=False):
        assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()) + 1e-6


@world(2)
def test_models_attend_as_one_process_does() -> None:
    """Plain, padded (with the mask split or whole), in packed documents, in a sliding window, and both ways."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    compare(accelerator, "plain", 5)
    for kind in ("padded", "padded, whole mask", "packed", "sliding", "bert"):
        compare(accelerator, kind, 2)


@world(2, quiet=30)
def test_compiled_models_attend_as_one_process_does() -> None:
    """Compiled whole, a model is given the masks that it is given uncompiled: a causal one, padding, documents."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2), dynamo_backend="eager")
    for kind in ("plain", "padded", "packed"):
        compare(accelerator, kind, 2)


@world(2)
def test_a_sharded_model_attends_as_one_process_does() -> None:
    """FSDP2 shards a Llama over the ranks that share its sequences, and computes activations again."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    plugin.activation_checkpointing = True
    axes = ParallelismConfig(cp_size=2)
    compare(Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=axes), "packed", 5)


@world(2)
def test_what_a_model_would_get_wrong_is_refused() -> None:
    """Eager attention, positions left out, and labels that the model would shift, are refused."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(PreparationError, match='attn_implementation="sdpa"'):
        accelerator.prepare(model_of("plain", "eager"))
    model = accelerator.prepare(model_of("plain"))
    part = Share(LENGTH, ensure().rank, 2)
    for left_out, added, words in (("position_ids", "", "position_ids=None"), ("", "labels", "shift_labels")):
        given = inputs_of("plain", 0)
        given = {name: value for name, value in given.items() if name not in (left_out, "labels") or name == added}
        split = list(given.values())
        block = accelerator.maybe_context_parallel(split, [1] * len(split))
        with pytest.raises(EngineUnavailableError, match=words), block:
            model(**given)
    given = inputs_of("plain", 0)
    del given["labels"]
    expected = model(**given).logits
    with accelerator.maybe_context_parallel(list(given.values()), [1, 1]):
        got = model(**given).logits
    torch.testing.assert_close(got, part.of(expected, 1), rtol=1e-5, atol=1e-6)
