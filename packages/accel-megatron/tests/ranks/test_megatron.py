"""Models in engines of megatron-core, against one rank; the library computes on the CPU by a stand-in for CUDA."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.manifest import Manifest
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    ConfigurationError,
    DataError,
    EngineUnavailableError,
    PreparationError,
    StateError,
)
from accel_core.state import PartialState, reset_all
from accel_megatron import (
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
    library,
)
from accel_megatron.plugin import MegatronLMDummyScheduler, MegatronLMPlugin
from accel_testing import requires, world

pytestmark = [requires("megatron", "transformers"), pytest.mark.slow]

STEPS = 5
SAMPLES = 4  # of a step, whatever the degrees
LENGTH = 16
QUIET = 30.0
LIBRARIES = ("transformers.modeling_utils", "megatron.core.models.gpt")
PARTS = {"num_micro_batches": 2}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tensor": ({"tp_degree": 2}, ("gpt", "bert", "t5")),
    "sequence": ({"tp_degree": 2, "sequence_parallelism": True}, ("gpt", "bert", "t5")),
    "data": ({"use_distributed_optimizer": True}, ("gpt", "bert", "t5")),
    "pipeline": ({"pp_degree": 2}, ("gpt", "bert")),
    "virtual": ({"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}, ("gpt",)),
    "expert": ({"expert_model_parallel_size": 2}, ("gpt",)),
    "selective": ({"recompute_activations": True, "use_rotary_position_embeddings": False}, ("gpt",)),
}


FIRST = ("tensor",)
"""Cases of the first tier."""

VARIANTS = {"selective": "-learned", "expert": "-experts"}
"""Cases that are compared with another model of their kind."""

WAYS: dict[str, dict[str, Any]] = {
    "gpt-learned": {"use_rotary_position_embeddings": False},
    "gpt-experts": {
        "recompute_activations": True,
        "other_megatron_args": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather",
            "moe_aux_loss_coeff": 0.0,
            "add_bias_linear": False,
        },
    },
}
"""Those models, and what they are made of."""


def begin() -> None:
    """Let megatron-core compute on the CPU from the same weights each time, and call what torch deprecates."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    runpy.run_path(str(Path(__file__).with_name("cuda_on_cpu.py")))["stand_in"]()
    # megatron-core asks for a kernel of Transformer Engine by a name that it only has with that, and goes on without.
    importlib.import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None  # type: ignore[attr-defined]
    library.has_transformer_engine = lambda: True


def model(kind: str) -> Any:
    """Return a small model of transformers."""
    transformers = importlib.import_module("transformers")
    shared = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt":
        config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=LENGTH, **shared)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
            max_position_embeddings=LENGTH, **shared
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
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
        ids = torch.randint(3, 256, (LENGTH,), generator=generator)
        labels = torch.randint(3, 256, (LENGTH,), generator=generator) if kind == "t5" else ids.clone()
        mask = torch.ones(LENGTH, dtype=torch.long)
        if index % 4:
            mask[-(index % 4) :] = 0
            labels[-(index % 4) :] = -100
        if kind == "bert":
            labels[torch.rand(LENGTH, generator=generator) < 0.5] = -100
        found.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return found


# With the usual eps, gradients that are zero but for noise, as those of biases of keys, make steps as large as others.
ADAM = partial(torch.optim.AdamW, eps=1e-5)


def prepared(
    kind: str, plugin: dict[str, Any], optimized: Callable[..., Any] = ADAM, **others: Any
) -> tuple[Accelerator, Any, Any, Any, Any]:
    """Return an Accelerator and what it prepared: engine, optimizer, loader and schedule."""
    reset_all()
    accelerator = Accelerator(megatron_lm_plugin=MegatronLMPlugin(**{**PARTS, **plugin}), **others)
    ranks = accelerator._runtime.layout.replicas
    micro = SAMPLES // ranks // (accelerator.state.megatron_lm_plugin.num_micro_batches or 1)
    given = model(kind)
    optimizer = optimized(given.parameters(), lr=1e-2, weight_decay=0.1)
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
        assert not optimizer.step_was_skipped
        found.append((loss.item(), engine.last.grad_norm, schedule.get_last_lr()[0]))
    return found


def note(folder: Path, name: str, story: Any) -> None:
    """Keep what this rank saw."""
    (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(story))


def noted(folder: Path, name: str, rank: int = 0) -> Any:
    """Return what a rank saw."""
    return json.loads((folder / f"{name}-{rank}.json").read_text())


on_ranks = partial(world, quiet=QUIET, preload=LIBRARIES)


def reference(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Train each kind of model on one rank from where it saves, once for each way that changes the mathematics."""
    begin()
    for name, plugin in cases.items():
        kind = name.partition("-")[0]
        accelerator, *parts = prepared(kind, plugin)
        accelerator.save_state(str(folder / f"start-{name}"))
        note(folder, name, trained(accelerator, *parts))
        accelerator.save_state(str(folder / f"end-{name}"))


def spread(folder: Path, case: str, kinds: tuple[str, ...], plugin: dict[str, Any]) -> None:
    """Train on several ranks from where one rank began, and on from where it ended."""
    begin()
    for kind in kinds:
        start = f"{kind}{VARIANTS.get(case, '')}"
        plugin = {**WAYS.get(start, {}), **plugin}
        accelerator, *parts = prepared(kind, plugin)
        accelerator.load_state(str(folder / f"start-{start}"))
        note(folder, f"{case}-{kind}", trained(accelerator, *parts))
        accelerator.save_state(str(folder / f"end-{case}-{kind}"))
        assert accelerator.is_main_process == accelerator.is_last_process == PartialState().is_main_process
        batch = next(iter(parts[2]))
        rows = accelerator.gather_for_metrics(batch["input_ids"])
        expected = torch.stack([sample["input_ids"] for sample in samples(kind)[:SAMPLES]])
        assert torch.equal(rows, expected)
        mean = avg_losses_across_data_parallel_group([torch.tensor(float(accelerator.process_index))])
        replicas = accelerator._runtime.layout.replicas
        assert mean.tolist() == [0.5 if replicas > 1 else float(accelerator.process_index)]
        assert gather_across_data_parallel_groups({"x": batch["input_ids"]})["x"].shape == (SAMPLES, LENGTH)


def resumed(folder: Path, saved: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Go on, on one rank, from where other degrees ended."""
    begin()
    for name, (kind, plugin) in saved.items():
        accelerator, *parts = prepared(kind, plugin)
        accelerator.load_state(str(folder / f"end-{name}"))
        assert parts[0].iteration == STEPS
        note(folder, f"resumed-{name}", trained(accelerator, *parts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what one rank did."""
    made = tmp_path_factory.mktemp("megatron")
    on_ranks(1)(reference)(made, {kind: {} for kind in ("gpt", "bert", "t5")})
    return made


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.full("another case of a grid")] if case not in FIRST else [])
        for case in CASES
    ],
)
def test_degrees_change_nothing(folder: Path, case: str) -> None:
    """Loss, gradient norm and learning rate of five steps are those of one rank, and so is every rank's view."""
    plugin, kinds = CASES[case]
    if case in VARIANTS:
        start = f"{kinds[0]}{VARIANTS[case]}"
        on_ranks(1)(reference)(folder, {start: WAYS[start]})
    on_ranks(2)(spread)(folder, case, kinds, plugin)
    for kind in kinds:
        alone = noted(folder, f"{kind}{VARIANTS.get(case, '')}")
        for rank in (0, 1):
            for step, expected in zip(noted(folder, f"{case}-{kind}", rank), alone, strict=True):
                assert step == pytest.approx(expected, rel=1e-5)


@pytest.mark.full("another case of a grid")
def test_other_degrees_go_on(folder: Path) -> None:
    """What two ranks saved, tensors, stages or states of the optimizer in parts, one rank goes on from alike."""
    saved: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in ("gpt", "bert", "t5")}
    for case in ("tensor", "pipeline", "data"):
        plugin, kinds = CASES[case]
        if not all((folder / f"end-{case}-{kind}").exists() for kind in kinds):
            on_ranks(2)(spread)(folder, case, kinds, plugin)
        own = {"use_distributed_optimizer": True} if case == "data" else {}
        saved |= {f"{case}-{kind}": (kind, own) for kind in kinds}
    on_ranks(1)(resumed)(folder, saved)
    for name, (kind, _) in saved.items():
        for step, alone in zip(noted(folder, f"resumed-{name}"), noted(folder, f"resumed-{kind}"), strict=True):
            assert step == pytest.approx(alone, rel=1e-4), name
    manifest = Manifest.read(folder / "end-tensor-gpt")
    assert manifest is not None
    listed = {entry.name for entry in manifest.entries if entry.digest}
    there = (folder / "end-tensor-gpt/pytorch_model_megatron").iterdir()
    assert listed >= {f"pytorch_model_megatron/{path.name}" for path in there}


class WeightedStep(GPTTrainStep):
    """A step of the user's own, whose loss counts double."""

    def __init__(self, accelerator: object, args: Any, factor: float) -> None:
        self.factor = factor
        super().__init__(accelerator, args)

    def get_loss_func(self, accelerator: object) -> Callable[..., Any]:
        """Return the mean loss, times a factor."""

        def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
            loss = self.factor * (output.float() * loss_mask).sum() / loss_mask.sum()
            return loss, {"own": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func


def whole_batch() -> dict[str, torch.Tensor]:
    """Return the batch of one step."""
    return {name: torch.stack([one[name] for one in samples("gpt")[:SAMPLES]]) for name in samples("gpt")[0]}


@on_ranks(1)
def test_steps_losses_logits_and_batches_of_the_user(folder: Path) -> None:
    """A step, a loss and a reading of batches of the user's own replace megatron-core's; logits come on request."""
    begin()
    start = str(folder / "start-gpt")
    batch = whole_batch()
    plain = noted(folder, "gpt")[0][0]
    one = {"num_micro_batches": 1}

    accelerator, engine, *_ = prepared("gpt", {**one, "return_logits": True})
    accelerator.load_state(start)
    engine.eval()
    found = engine(**batch)
    assert found.loss.item() == pytest.approx(plain, rel=1e-5)
    assert found.logits.shape == (SAMPLES, LENGTH, 256)
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    by_hand = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), shifted.flatten())
    assert by_hand.item() == pytest.approx(plain, rel=1e-5)
    assert engine.iteration == 0
    engine.log_eval_results()

    step = {"custom_train_step_class": WeightedStep, "custom_train_step_kwargs": {"factor": 2.0}}
    accelerator, engine, *_ = prepared("gpt", {**one, **step})
    accelerator.load_state(start)
    assert engine(**batch).loss.item() == pytest.approx(2 * plain, rel=1e-5)
    assert engine.last.grad_norm == pytest.approx(2 * noted(folder, "gpt")[0][1], rel=1e-5)

    def read(iterator: Any) -> Any:
        data = next(iterator)
        tokens = data["input_ids"]
        return tokens, tokens, torch.zeros_like(tokens).float().index_fill(1, torch.tensor([0]), 1.0), None, None

    def first(mask: torch.Tensor, output: torch.Tensor) -> Any:
        return (output * mask).sum(), mask.sum().to(torch.int), {"first": (output * mask).sum().detach()}

    accelerator, engine, *_ = prepared("gpt", {**one, "custom_get_batch_function": read, "custom_loss_function": first})
    assert engine.eval_step(**batch)["first"] > 0

    accelerator, engine, *_ = prepared("llama", {}, torch.optim.SGD)
    norms = [layer.input_layernorm for layer in engine.base_model.module.decoder.layers]
    assert {type(norm) for norm in norms} == {torch.nn.RMSNorm}
    before = engine(**batch).loss.item()
    for _ in range(3):
        accelerator.backward(engine(**batch).loss)
    assert engine(**batch).loss.item() < before
    accelerator.save_state(str(folder / "llama"))
    generators = importlib.import_module("megatron.core.tensor_parallel.random")
    states = generators.get_cuda_rng_tracker().get_states()
    continuing = engine(**batch).loss.item()
    accelerator, engine, *_ = prepared("llama", {}, torch.optim.SGD)
    for state in generators.get_cuda_rng_tracker().get_states().values():
        state.zero_()
    accelerator.load_state(str(folder / "llama"))
    found = generators.get_cuda_rng_tracker().get_states()
    assert all(torch.equal(found[name], state) for name, state in states.items())
    assert engine(**batch).loss.item() == pytest.approx(continuing, rel=1e-5)


@on_ranks(1)
def test_indexed_datasets_are_read_and_gone_on_with(tmp_path: Path) -> None:
    """A loader that stands for megatron-core's datasets gives three iterators, whose position is saved."""
    begin()
    indexed = importlib.import_module("megatron.core.datasets.indexed_dataset")
    prefix = str(tmp_path / "text")
    builder = indexed.IndexedDatasetBuilder(prefix + ".bin", dtype=importlib.import_module("numpy").int32)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        builder.add_document(torch.randint(3, 256, (50,), generator=generator), [50])
    builder.finalize(prefix + ".idx")

    def start() -> Any:
        reset_all()
        plugin = MegatronLMPlugin(megatron_dataset_flag=True, eval_iters=2, eval_interval=100, **PARTS)
        accelerator = Accelerator(megatron_lm_plugin=plugin)
        given = model("gpt")
        optimizer = torch.optim.AdamW(given.parameters(), lr=1e-3)
        data = MegatronLMDummyDataLoader(
            data_path=[prefix], splits_string="80,10,10", seq_length=LENGTH, micro_batch_size=2
        )
        schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=1)
        return accelerator, *accelerator.prepare(given, optimizer, schedule, data, data, data)

    accelerator, engine, _, _, train, valid, test = start()
    first, second = next(train), next(train)
    assert first["tokens"].shape == (SAMPLES, LENGTH)
    assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])
    engine(**first)
    accelerator.save_state(str(tmp_path / "indexed"))
    third = next(train)
    assert valid is not None
    assert test is not None
    assert not torch.equal(second["tokens"], third["tokens"])
    accelerator, engine, _, _, train, *_ = start()
    accelerator.load_state(str(tmp_path / "indexed"))
    assert torch.equal(next(train)["tokens"], third["tokens"])


@on_ranks(1)
def test_what_no_engine_is_made_of(tmp_path: Path) -> None:
    """Each is refused by name, before groups, models or checkpoints are touched."""
    begin()
    state = importlib.import_module("megatron.core.parallel_state")
    given = model("gpt")
    optimizer = torch.optim.AdamW(given.parameters())
    plugin = MegatronLMPlugin(**PARTS)
    with pytest.raises(ConfigurationError, match="num_micro_batches=4"):
        Accelerator(megatron_lm_plugin=plugin, gradient_accumulation_steps=4)
    reset_all()
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    unknown = SimpleNamespace(config=SimpleNamespace(model_type="zebra"))
    stranger = torch.nn.Linear(1, 1)
    stranger.config = unknown.config  # type: ignore[assignment]
    custom = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rates = torch.optim.AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(list(given.parameters())[:2])])
    for objects, error, message in (
        ((stranger,), ConfigurationError, "'zebra'.*gpt2"),
        ((given, model("gpt")), PreparationError, "2 models"),
        ((optimizer,), PreparationError, "without it"),
        ((given, optimizer, custom), ConfigurationError, "LambdaLR.*MegatronLMDummyScheduler"),
        ((given, rates), PreparationError, "differ in lr"),
        ((given, torch.optim.Adagrad(given.parameters())), ConfigurationError, "Adagrad"),
    ):
        with pytest.raises(error, match=message):
            accelerator.prepare(*objects)
        assert not state.model_parallel_is_initialized()
    engine, _ = accelerator.prepare(given, optimizer)
    batch = whole_batch()
    before = [parameter.clone() for parameter in engine.parameters()]
    left = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    for wrong, message in (
        ({name: value[:3] for name, value in batch.items()}, "got 3 samples"),
        ({}, "got none"),
        (left, "padding_side"),
    ):
        with pytest.raises(DataError, match=message):
            engine(**wrong)
    assert all(torch.equal(old, new) for old, new in zip(before, engine.parameters(), strict=True))
    loss = engine(**batch).loss
    for call, message in (
        (partial(accelerator.backward, loss * 2), "another loss"),
        (partial(accelerator.clip_grad_norm_, engine.parameters(), 0.5), "gradient_clipping=1.0"),
        (partial(accelerator.clip_grad_value_, engine.parameters(), 0.5), "clip_grad_value_"),
        (partial(accelerator.get_state_dict, engine), "save_state"),
        (partial(accelerator.ema, engine), r"got accelerator\.ema"),
        (partial(accelerator.prepare_model, given), "2 models"),
        (partial(engine.save_checkpoint, "there"), "save_state"),
        (partial(accelerator.prepare, model("gpt")), "2 models"),
    ):
        with pytest.raises((PreparationError, EngineUnavailableError), match=message):
            call()
    assert accelerator.clip_grad_norm_(engine.parameters(), 1.0).item() == pytest.approx(engine.last.grad_norm)
    accelerator.save_state(str(tmp_path))
    shard = next((tmp_path / "pytorch_model_megatron").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(CheckpointDamagedError, match="distcp"):
        accelerator.load_state(str(tmp_path))
    reset_all()
    with pytest.raises(EngineUnavailableError, match="only the pretraining heads"):
        Accelerator(megatron_lm_plugin=MegatronLMPlugin()).prepare(
            importlib.import_module("transformers").MegatronBertForSequenceClassification(model("bert").config)
        )


@on_ranks(2)
def test_what_two_ranks_cannot_do(folder: Path) -> None:
    """Degrees, models and checkpoints that do not fit are refused on every rank alike; logits are whole."""
    begin()
    with pytest.raises(ConfigurationError, match="have to divide the number of processes"):
        Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=3))
    with pytest.raises(EngineUnavailableError, match="an encoder-decoder model"):
        prepared("t5", {"pp_degree": 2})
    accelerator, engine, *_ = prepared("gpt", {"tp_degree": 2, "return_logits": True, "num_micro_batches": 1})
    with pytest.raises(CheckpointMismatchError, match="layers"):
        accelerator.load_state(str(folder / "start-bert"))
    accelerator.load_state(str(folder / "start-gpt"))
    engine.eval()
    found = engine(**whole_batch())
    assert found.loss.item() == pytest.approx(noted(folder, "gpt")[0][0], rel=1e-5)
    assert found.logits.shape == (SAMPLES, LENGTH, 256)
    with pytest.raises(StateError, match="create Megatron's groups only once"):
        prepared("gpt", {"tp_degree": 1})
