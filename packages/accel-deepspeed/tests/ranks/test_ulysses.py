"""Sequences over several ranks by Ulysses, against one process that sees them whole."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.errors import (
    ConfigurationError,
    DataError,
    EngineUnavailableError,
    PreparationError,
    UnsupportedTypeError,
)
from accel_core.plugins import fsdp
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.parallelism import DeepSpeedSequenceParallelConfig, ParallelismConfig
from accel_core.state import reset_all
from accel_deepspeed.plugin import DeepSpeedPlugin
from accel_testing import requires, world

pytestmark = requires("deepspeed", "transformers")

BATCH, TOKENS, WORDS, IGNORED = 2, 8, 32, -100
WINDOW, CLIP = 2, 0.5


def begin() -> None:
    """Let DeepSpeed call what torch.distributed deprecates, and keep the drop-in's defaults out of the run."""
    warnings.filterwarnings("ignore", r"`?torch\.distributed[\w.]+`? is deprecated", FutureWarning)
    importlib.import_module("transformers.integrations.deepspeed")
    GradientAccumulationPlugin.default_short_window = "actual"
    DataLoaderConfiguration.default_restore_position = staticmethod(lambda: True)


def llama(*, heads: int = 4, shared: int = 2, attention: str = "sdpa", **others: Any) -> Any:
    """Return a small model with random weights, the same on every rank."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(3)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=heads, num_key_value_heads=shared, attn_implementation=attention, **others
    )
    return transformers.LlamaForCausalLM(config)


def texts(count: int, *, uneven: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return sequences; with `uneven`, labels are ignored so that some ranks have many, some few and some none."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        words = torch.randint(WORDS, (TOKENS,), generator=generator)
        labels = words.clone()
        if uneven:
            labels[: (5, 3, 6, 1)[number % 4]] = IGNORED
        found.append({"input_ids": words, "labels": labels})
    return found


def run_of(
    size: int, stage: int, *, sp: int = 2, handler: Any = None, zero: dict[str, Any] | None = None, **others: Any
) -> Accelerator:
    """Begin a run whose ranks share sequences."""
    begin()
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, **(zero or {})}
    waiting = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config={**waiting, "zero_optimization": zero})
    axes = ParallelismConfig(sp_backend="deepspeed", sp_size=sp, dp_shard_size=max(size // sp, 1), sp_handler=handler)
    return Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=axes, **others)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that shows a gradient of a wrong size, as Adam does not."""
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


def summed(net: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of the tokens that a rank holds, and how many of them count."""
    given = dict(given)
    labels = given.pop("shift_labels").flatten()
    logits = net(**given).logits.flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def gathered(net: Any, given: dict[str, torch.Tensor], group: Any) -> torch.Tensor:
    """Return the mean loss over whole sequences, as Accelerate's guide computes it on ranks that share them."""
    loss = net(**given, labels=given["shift_labels"]).loss
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = torch.distributed.nn.functional.all_gather((given["shift_labels"] != IGNORED).sum(), group=group)
    whole = sum(each * count for each, count in zip(losses, counts, strict=True) if count > 0)
    return cast("torch.Tensor", whole / max(sum(counts), 1))


def share(net: Any, given: dict[str, torch.Tensor], group: Any) -> tuple[torch.Tensor, float]:
    """Return a loss whose mean over ranks is that over whole sequences, and the latter: gloo gathers in WORLD alone."""
    loss, count = summed(net, given)
    total = torch.stack([loss.detach(), count.float()])
    torch.distributed.all_reduce(total, group=group)
    return loss / total[1] * group.size(), float(total[0] / total[1])


def train(
    accelerator: Accelerator, net: Any, optimizer: Any, loader: Any, *, weighted: bool, folder: Path | None = None
) -> list[float]:
    """Train over the loader, and return losses (where they are not weighted) and norms.

    With a folder, the state is saved into it after the first window, and only what comes after it is returned.
    """
    found: list[float] = []
    group = accelerator.torch_device_mesh["sp"].get_group()
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(net):
            if weighted:
                loss, count = summed(net, batch)
                accelerator.backward(loss, weight=count)
            elif accelerator.num_processes == group.size():
                loss = gathered(net, batch, group)
                found.append(loss.item())
                accelerator.backward(loss)
            else:
                loss, whole = share(net, batch, group)
                found.append(whole)
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(net.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None and number == WINDOW:
            accelerator.save_state(folder)
            found.clear()
    return found


def plain(net: Any, data: list[dict[str, torch.Tensor]], replicas: int, *, weighted: bool) -> list[list[float]]:
    """Train on one process over whole sequences, and return for each replica what `train` does."""
    optimizer, found = momentum(net), [[] for _ in range(replicas)]
    batches = [collate(data[start : start + BATCH]) for start in range(0, len(data), BATCH)]
    rounds = [batches[start : start + replicas] for start in range(0, len(batches), replicas)]
    for start in range(0, len(rounds), WINDOW):
        window = rounds[start : start + WINDOW]
        counts = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for each in window for batch in each)
        for each in window:
            for own, batch in zip(found, each, strict=True):
                loss = net(**batch).loss
                if weighted:
                    (loss * (batch["labels"][:, 1:] != IGNORED).sum() / counts).backward()
                else:
                    own.append(loss.item())
                    (loss / len(window) / replicas).backward()
        norm = float(nn.utils.clip_grad_norm_(net.parameters(), CLIP))
        for own in found:
            own.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    return found


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack sequences."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def equals(accelerator: Accelerator, net: Any, expected: nn.Module) -> None:
    """Compare a prepared model's whole weights with those of a plain one, on the first rank."""
    state = accelerator.get_state_dict(net)
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(state), dict(expected.state_dict()), rtol=1e-6, atol=1e-6)
    accelerator.wait_for_everyone()


def trains_as_one_process(size: int, cases: tuple[tuple[int, bool], ...]) -> None:
    """Train over windows of which the last is short, clipped, with labels ignored unevenly."""
    replicas = size // 2
    data = texts((4 * WINDOW + 1) * BATCH * replicas, uneven=True)  # five steps
    for stage, weighted in cases:
        expected, net = llama(), llama()
        wanted = plain(expected, data, replicas, weighted=weighted)
        accelerator = run_of(size, stage, gradient_accumulation_steps=WINDOW)
        net, optimizer, loader = accelerator.prepare(net, momentum(net), DataLoader(data, batch_size=BATCH))
        assert len(loader) == 4 * WINDOW + 1
        found = train(accelerator, net, optimizer, loader, weighted=weighted)
        torch.testing.assert_close(found, wanted[accelerator.process_index // 2], rtol=1e-5, atol=1e-6)
        assert net.sequence_parallel_size == 2
        equals(accelerator, net, expected)
        reset_all()


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, ((0, False), (1, True), (2, False), (3, False), (3, True))), (4, ((1, False), (3, True)))],
    ids=["a pair", "two pairs"],
)
def test_ranks_that_share_sequences_train_as_one_process(size: int, cases: tuple[tuple[int, bool], ...]) -> None:
    """Accumulated, cut short, clipped, weighted, with uneven labels: losses, norms and weights are one process's."""
    world(size, quiet=30)(trains_as_one_process)(size, cases)


def logits_of(net: Any, rows: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return what a model says of whole sequences."""
    with torch.no_grad():
        found: torch.Tensor = net(input_ids=collate(rows)["input_ids"]).logits
    return found


@world(2, quiet=30)
def test_whole_sequences_are_read_as_without_sharing() -> None:
    """A loader of its own gives each rank whole sequences to evaluate, inside the training loop too, each one once."""
    data, expected = texts(11), llama(heads=4, shared=1).eval()  # ranks hold copies of keys and values
    accelerator = run_of(2, 1)
    net = llama(heads=4, shared=1)
    net, _, loader = accelerator.prepare(net, momentum(net), DataLoader(data, batch_size=4))
    held_out = accelerator.prepare(DataLoader(data, batch_size=BATCH))
    own = slice(accelerator.process_index * TOKENS // 2, (accelerator.process_index + 1) * TOKENS // 2)
    sizes = []
    for batch in loader:
        with pytest.raises(DataError, match="cut over ranks"):
            accelerator.gather_for_metrics(batch["input_ids"])
        net.eval()
        rows = data[4 * len(sizes) : 4 * len(sizes) + len(batch["input_ids"])]
        sizes.append(len(rows))
        wanted = logits_of(expected, rows)
        with torch.no_grad():
            found = net(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        torch.testing.assert_close(found, wanted[:, own], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits_of(net, rows), wanted, rtol=1e-5, atol=1e-5)  # a prompt inside the loop
        ids, said = [], []
        for whole in held_out:
            with torch.no_grad():
                logits = net(input_ids=whole["input_ids"]).logits
            ids.append(accelerator.gather_for_metrics(whole["input_ids"]))
            said.append(accelerator.gather_for_metrics(logits))
        torch.testing.assert_close(torch.cat(ids), collate(data)["input_ids"])
        torch.testing.assert_close(torch.cat(said), logits_of(expected, data), rtol=1e-5, atol=1e-5)
        net.train()
    assert sizes == [4, 4, 3], "the last batch is short, as on one process"
    with pytest.raises(PreparationError, match="got whole ones, of 8 tokens"):
        logits_of(net, data[:2])


@world(2, quiet=30)
def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Saved in the middle of an epoch and restored, the next steps are those of the run that went on, bit by bit."""
    data = texts(7 * BATCH, uneven=True)
    for stage in (1, 3):
        folder = tmp_path / str(stage)
        accelerator, net, optimizer, loader = beginning(data, stage)
        wanted = train(accelerator, net, optimizer, loader, weighted=True, folder=folder)
        state = {name: value.clone() for name, value in accelerator.get_state_dict(net).items()}
        reset_all()
        accelerator, net, optimizer, loader = beginning(data, stage)
        accelerator.load_state(folder)
        assert train(accelerator, net, optimizer, loader, weighted=True) == wanted
        assert len(wanted) == 3, "two windows, and a short one"
        found = accelerator.get_state_dict(net)
        assert all(torch.equal(found[name], value) for name, value in state.items())
        reset_all()


def beginning(data: list[dict[str, torch.Tensor]], stage: int) -> tuple[Accelerator, Any, Any, Any]:
    """Return a run, and what it prepared."""
    accelerator, net = run_of(2, stage, gradient_accumulation_steps=WINDOW), llama()
    return accelerator, *accelerator.prepare(net, momentum(net), DataLoader(data, batch_size=BATCH, shuffle=True))


@world(2, quiet=30)
def test_a_loss_that_no_labels_gave_is_refused() -> None:
    """A model that gets a batch as it is computes no loss; the error names what the batch has, and training goes on."""
    accelerator, net, optimizer, loader = beginning(texts(8), 1)
    batches = iter(loader)
    with accelerator.accumulate(net), pytest.raises(UnsupportedTypeError, match="shift_labels in place of labels"):
        accelerator.backward(net(**next(batches)).loss)
    loss, count = summed(net, next(batches))
    accelerator.backward(loss, weight=count)
    optimizer.step()


@world(2, quiet=30)
def test_models_without_sequence_sharing_are_refused_first() -> None:
    """Models, loaders, sequences and configurations that cannot be are named on every rank; nothing was prepared."""
    begin()
    axes = ParallelismConfig(sp_size=2)
    with pytest.raises((ConfigurationError, EngineUnavailableError), match=r"sp_size=2|'mesh'"):
        Accelerator(cpu=True, parallelism_config=axes)
    with pytest.raises(ConfigurationError, match="sp_size=2 and the engine 'fsdp"):
        Accelerator(cpu=True, parallelism_config=axes, fsdp_plugin=fsdp.FullyShardedDataParallelPlugin(fsdp_version=2))
    transformers = importlib.import_module("transformers")
    gpt2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=WORDS)
    bidirectional = llama()
    bidirectional.model.layers[0].self_attn.is_causal = False
    small = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": WORDS}
    sliding = transformers.MistralConfig(**small, num_attention_heads=2, num_key_value_heads=2, sliding_window=4)
    for net, words in (
        (nn.Linear(2, 2), "without a transformers configuration"),
        (llama(heads=1, shared=1), "got 1 heads and 1 key-value heads for sp_size=2"),
        (llama(attention="eager"), "LlamaForCausalLM with 'eager'"),
        (transformers.GPT2LMHeadModel(gpt2), "has no num_key_value_heads"),
        (transformers.MistralForCausalLM(sliding), "with sliding_attention"),
        (bidirectional, "model.layers.0.self_attn"),
    ):
        unprepared(PreparationError, words, net)
    for settings in ({"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}):
        unprepared(PreparationError, "that batches differently", llama(), data=settings)
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")
    unprepared(PreparationError, "'sdpa' and sp_attn_implementation='flash_attention_2'", llama(), handler=handler)
    unprepared(ConfigurationError, "reduce_scatter=false", llama(), stage=3, zero={"reduce_scatter": False})
    with pytest.raises(ConfigurationError, match=r"got \d+ and 2 processes"):
        run_of(2, 1, sp=4)
    for axis in ("dp_shard", "ep"):
        axes = ParallelismConfig(**{f"{axis}_size": 2})
        with pytest.raises(EngineUnavailableError, match=rf"got \['{axis}'\]"):
            Accelerator(cpu=True, parallelism_config=axes, deepspeed_plugin=DeepSpeedPlugin())


def unprepared(
    kind: type[Exception],
    words: str,
    net: nn.Module,
    *,
    stage: int = 1,
    data: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    handler: Any = None,
) -> None:
    """Assert that a model and a loader are refused, and that neither model nor optimizer was prepared."""
    accelerator = run_of(
        2, stage, handler=handler, zero=zero, dataloader_config=DataLoaderConfiguration(**(data or {}))
    )
    with pytest.raises(kind, match=words):
        accelerator.prepare(net, momentum(net), DataLoader(texts(4), batch_size=BATCH))
    assert (accelerator._models, accelerator._optimizers) == ([], [])
    reset_all()
