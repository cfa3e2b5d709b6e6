"""Small models, data and summaries for the clients: random weights from a seed, nothing from a hub."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate.utils import gather_object

VOCABULARY = 32
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
CPU = "ACCELERATE_TORCH_DEVICE" not in os.environ
"""Whether a client computes on the CPU; `on_devices.py` gives it a simulated accelerator."""
QUIET: dict[str, Any] = {
    "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": CPU, "save_strategy": "no",
    "disable_tqdm": True,
}  # fmt: skip
"""Arguments of trainings that log each loss, and neither report nor save."""


def llama(seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    """Return a Llama of a few thousand parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def sequences(count: int, length: int = 8, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return token sequences that are their own labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Sequences without a length.

    Args:
        count: How many.
        seed: Where they come from.
    """

    def __init__(self, count: int, seed: int = 1) -> None:
        self.rows = sequences(count, seed=seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the sequences."""
        yield from self.rows


def lora() -> Any:
    """Return the configuration of adapters that are not zero."""
    from peft import LoraConfig  # the environment of a client without adapters may have no peft

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def adapted() -> Any:
    """Return the Llama with adapters."""
    from peft import get_peft_model

    net = llama()
    torch.manual_seed(3)
    return get_peft_model(net, lora())


def settings(name: str, **given: Any) -> dict[str, Any]:
    """Return arguments of one epoch in batches of four, of all ranks together."""
    batch = {"per_device_train_batch_size": 4 // WORLD, "num_train_epochs": 1}
    return {"output_dir": name, **batch, **QUIET, **given}


def logged(trainer: Any, **names: str) -> dict[str, list[Any]]:
    """Return what a trainer logged, under other names."""
    history = trainer.state.log_history
    return {ours: [row[theirs] for row in history if theirs in row] for ours, theirs in names.items()}


def some_of(state: dict[str, torch.Tensor]) -> list[float]:
    """Return some of the weights in a state, which is empty on ranks that do not gather it."""
    if not state:
        return [0.0]
    flat = torch.cat([tensor.float().reshape(-1) for _, tensor in sorted(state.items())])
    found: list[float] = flat[:: max(1, flat.numel() // 200)].tolist()
    return found


def hash_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of tensors and their names, bit by bit."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        values = tensor.detach().cpu().reshape(-1).contiguous()
        total.update(name.encode() + values.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digest(model: nn.Module) -> str:
    """Return a hash of all weights."""
    return hash_of(sorted(model.state_dict().items()))


def trained(model: nn.Module) -> dict[str, Any]:
    """Return some of a model's weights, whether they are the same on all ranks, and in one process a hash of all."""
    found = digest(model)
    flat = torch.cat([tensor.detach().cpu().reshape(-1) for _, tensor in sorted(model.state_dict().items())])
    weights = {"weights": flat[:: max(1, flat.numel() // 50)].tolist()}
    if WORLD == 1:
        return {**weights, "ranks agree": True, "digest": found}
    return {**weights, "ranks agree": len(set(gather_object([found]))) == 1}


def report(results: dict[str, Any]) -> None:
    """Print the results as the last line, on the main rank."""
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps(results), flush=True)
