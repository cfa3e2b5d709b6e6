"""Models in engines of megatron-core, against one rank."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.plugins.megatron import MegatronLMDummyScheduler, MegatronLMPlugin
from accel_core.testing import requires

pytestmark = [requires("megatron", "transformers"), pytest.mark.slow]

STEPS = 5
SAMPLES = 4  # of a step, whatever the degrees
LENGTH = 16


def begin() -> None:
    """Let megatron-core compute on the CPU, and call what torch deprecates."""
    warnings.simplefilter("ignore")
    runpy.run_path(str(Path(__file__).with_name("cuda_on_cpu.py")))["stand_in"]()


def model(kind: str) -> Any:
    """Return a small model of transformers."""
    transformers = importlib.import_module("transformers")
    shared = {"vocab_size": 256}
    if kind == "gpt":
        config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=LENGTH, **shared)
        return transformers.GPT2LMHeadModel(config)
    if kind == "bert":
        config = transformers.MegatronBertConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=LENGTH, **shared
        )  # fmt: skip
        return transformers.MegatronBertForMaskedLM(config)
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, n_positions=LENGTH, **shared)
    return transformers.T5ForConditionalGeneration(config)


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    """Return the samples of some steps, some of whose tokens are padding or not predicted."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(STEPS * SAMPLES):
        ids = torch.randint(1, 256, (LENGTH,), generator=generator)
        labels = torch.randint(1, 256, (LENGTH,), generator=generator) if kind == "t5" else ids.clone()
        mask = torch.ones(LENGTH, dtype=torch.long)
        mask[LENGTH - index % 4 :] = 0 if index % 4 else 1
        labels[LENGTH - index % 4 :] = -100 if index % 4 else labels[-1]
        if kind == "bert":
            labels[torch.rand(LENGTH, generator=generator) < 0.5] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return found


def prepared(kind: str, plugin: dict[str, Any], **of_accelerator: Any) -> tuple[Accelerator, Any, Any, Any, Any]:
    """Return an Accelerator and what it prepared: engine, optimizer, loader and schedule."""
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**plugin), **of_accelerator)
    ranks = accelerator._runtime.layout.replicas
    micro = SAMPLES // ranks // (plugin.get("num_micro_batches") or 1)
    given = model(kind)
    optimizer = torch.optim.AdamW(given.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=20 * ranks, warmup_num_steps=2 * ranks)
    loader = DataLoader(samples(kind), batch_size=micro)  # type: ignore[arg-type, var-annotated]
    return accelerator, *accelerator.prepare(given, optimizer, loader, schedule)


def trained(accelerator: Accelerator, engine: Any, optimizer: Any, loader: Any, schedule: Any) -> list[Any]:
    """Train as any loop does, and return loss, norm of the gradient and learning rate of each step."""
    found = []
    for batch in loader:
        engine.train()
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append((loss.item(), engine.last.grad_norm, schedule.get_last_lr()[0]))
    return found


def whole_story(kind: str, plugin: dict[str, Any], start: str, out: str, save: bool) -> None:
    """Train from a checkpoint that one rank made, and note what happened."""
    begin()
    accelerator, *parts = prepared(kind, plugin)
    if save:
        accelerator.save_state(start)
    else:
        accelerator.load_state(start)
    story = trained(accelerator, *parts)
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(story))
    if not save:
        accelerator.save_state(str(Path(out, "after")))


def continued(kind: str, plugin: dict[str, Any], folder: str, out: str) -> None:
    """Train on from a checkpoint that other degrees made, and note what happened."""
    begin()
    accelerator, *parts = prepared(kind, plugin)
    report = accelerator.load_state(folder)
    assert parts[0].iteration == STEPS, report
    batch = next(iter(DataLoader(samples(kind), batch_size=SAMPLES)))  # type: ignore[arg-type, var-annotated]
    losses = [parts[0](**batch).loss.item() for _ in range(2)]
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps([losses, parts[-1].get_last_lr()]))


def stories(out: Path, ranks: int) -> list[Any]:
    """Return what each rank noted."""
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(ranks)]
