"""What a MegatronLMPlugin asks for is checked by arithmetic, without megatron-core."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accel_core.accelerator import Accelerator
from accel_core.errors import (
    ConfigurationError,
    DataError,
    EngineUnavailableError,
    MissingDependencyError,
    PreparationError,
    StateError,
)
from accel_core.options.engines import Engine, Presence
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.state import any_set
from accel_megatron import batches, library, loaders, optimizers, run
from accel_megatron.arguments import degrees_of, refuse_unhonored
from accel_megatron.models import refuse_unbuilt
from accel_megatron.plugin import MegatronLMDummyScheduler, MegatronLMPlugin
from accel_megatron.strategy import MegatronStrategy


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the strategy believe that megatron-core is there."""
    monkeypatch.setattr(Engine, "presence", lambda engine: Presence("0.16.1"))


def test_ranks_are_numbered_as_megatron_does(installed: None) -> None:
    """Tensor parallel runs fastest and stages slowest, with readers between; axes beside Megatron's are refused."""
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2)
    layouts = [MegatronStrategy.lay_out(rank, 8, None, plugin) for rank in range(8)]
    assert [layout.place(("tp",)) for layout in layouts] == [0, 1] * 4
    assert [layout.place(("pp",)) for layout in layouts] == [0] * 4 + [1] * 4
    assert layouts[0].parts == (0, 0, 1, 1, 0, 0, 1, 1)
    assert (layouts[0].replicas, layouts[0].readers) == (2, (0, 2))
    for axis in ("tp", "ep"):
        with pytest.raises(EngineUnavailableError, match=rf"with \['{axis}'\]\. .*tp_degree"):
            MegatronStrategy.lay_out(0, 2, ParallelismConfig(**{f"{axis}_size": 2}), MegatronLMPlugin())


@pytest.mark.parametrize(
    "degrees",
    [{"tp_degree": 3}, {"tp_degree": 2, "pp_degree": 4}, {"expert_model_parallel_size": 3}, {"tp_degree": -1}],
)
def test_degrees_multiply_to_the_processes(degrees: dict[str, Any]) -> None:
    """Degrees that leave a remainder are refused with all of them and the number of processes."""
    with pytest.raises(ConfigurationError, match=r"got tp_degree=.* for 4 processes\. Change a degree"):
        degrees_of(MegatronLMPlugin(**degrees), 4)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"use_custom_fsdp": True}, "use_custom_fsdp=True"),
        ({"tensorboard_dir": "logs"}, "tensorboard_dir='logs'.*log_with"),
        ({"pipeline_model_parallel_split_rank": 1}, "pipeline_model_parallel_split_rank=1"),
        ({"context_parallel_size": 2}, "Transformer Engine.*context_parallel_size=2"),
    ],
)
def test_what_megatron_core_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: dict[str, Any], message: str
) -> None:
    """A field that nothing would honor is refused by its name; the defaults are not."""
    monkeypatch.setattr(library, "has_transformer_engine", lambda: False)
    refuse_unhonored(MegatronLMPlugin())
    with pytest.raises(ConfigurationError, match=message):
        refuse_unhonored(MegatronLMPlugin(**field))


def test_without_the_library_a_run_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the run exists then, and functions that speak of one refuse."""
    absent = Presence(None, "megatron-core is not installed", "pip install megatron-core transformers")
    monkeypatch.setattr(Engine, "presence", lambda engine: absent)
    with pytest.raises(MissingDependencyError, match="Run `pip install megatron-core transformers`"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    assert not any_set()
    monkeypatch.setattr(run, "_now", [])
    with pytest.raises(StateError, match="Accelerator"):
        run.current()


def test_models_that_megatron_core_does_not_have_are_refused() -> None:
    """Another kind, another head, a pipeline of a T5, and virtual stages of a BERT."""
    shared: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": None}
    shared["num_experts"] = None
    with pytest.raises(ConfigurationError, match="gpt, bert, t5; got model_type_name='vit'"):
        refuse_unbuilt(Namespace(model_type_name="vit"))
    with pytest.raises(EngineUnavailableError, match="only the pretraining heads"):
        refuse_unbuilt(Namespace(model_type_name="bert", pretraining_flag=False, **shared))
    with pytest.raises(EngineUnavailableError, match="pp_degree=2"):
        refuse_unbuilt(Namespace(model_type_name="t5", **shared))
    shared["num_layers_per_virtual_pipeline_stage"] = 1
    with pytest.raises(EngineUnavailableError, match="for a bert"):
        refuse_unbuilt(Namespace(model_type_name="bert", pretraining_flag=True, **shared))


def test_schedules_and_groups_of_the_user_are_refused() -> None:
    """megatron-core has a schedule and groups of its own; what they cannot say is refused."""
    weights = [torch.zeros(2), torch.zeros(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    optimizers.refuse_schedule(MegatronLMDummyScheduler(optimizer, 3))
    with pytest.raises(ConfigurationError, match="LambdaLR"):
        optimizers.refuse_schedule(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    usual = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
    optimizers.refuse_groups(torch.optim.AdamW(usual))
    assert optimizers.settings_of(torch.optim.AdamW(usual))["weight_decay"] == usual[0]["weight_decay"]
    assert optimizers.settings_of(torch.optim.Adam(weights))["decoupled_weight_decay"] is False
    for own in ({"lr": 0.5, "weight_decay": 0.1}, {"weight_decay": 0.3}):
        other = torch.optim.AdamW([{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], **own}])
        with pytest.raises(PreparationError, match=f"differ in {next(iter(own))}"):
            optimizers.refuse_groups(other)
    with pytest.raises(PreparationError, match="SGD"):
        optimizers.refuse_kind(MegatronLMPlugin(use_distributed_optimizer=True), torch.optim.SGD(weights, lr=0.1))


def test_batches_hold_all_micro_batches() -> None:
    """A loader's batch is a micro batch; the prepared one has as many times more samples, in the same order."""
    plain: DataLoader[Any] = DataLoader(range(10), batch_size=2, drop_last=True)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loaders.enlarge(plain, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loaders.enlarge(plain, 1) is plain

    class Own(BatchSampler):
        """Batches of the user's own making."""

    sampler = Own(SequentialSampler(range(4)), 2, drop_last=False)
    own: DataLoader[Any] = DataLoader(range(4), batch_sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(PreparationError, match="with a Own"):
        loaders.enlarge(own, 2)


def of_batches(**plugin: Any) -> Any:
    """Return a run as far as batches ask for it."""
    arguments = Namespace(
        max_position_embeddings=8,
        sequence_parallel=plugin.get("sequence_parallelism", False),
        position_embedding_type="learned_absolute",
        eod_token_id=None,
        eos_token_id=7,
    )
    return SimpleNamespace(plugin=MegatronLMPlugin(**plugin), arguments=arguments, device=torch.device("cpu"))


def test_labels_are_moved_as_transformers_moves_them() -> None:
    """Each token predicts the next label; padding, the last token and, on request, the end of documents do not."""
    tokens = torch.tensor([[1, 2, 7, 4], [1, 2, 3, 0]])
    data = {"input_ids": tokens, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    _, labels, mask, hidden, positions = batches.gpt_batch(of_batches(), data, from_megatron=False)
    assert labels.tolist() == [[2, 7, 4, 0], [2, 3, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert hidden is None
    assert positions.tolist() == [[0, 1, 2, 3]] * 2
    _, _, mask, *_ = batches.gpt_batch(of_batches(eod_mask_loss=True), data, from_megatron=False)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    left = {**data, "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}
    with pytest.raises(DataError, match="padding_side='right'"):
        batches.gpt_batch(of_batches(), left, from_megatron=False)
    # True is hidden: later tokens for a decoder, padding for those who look at an encoder.
    assert batches.decoder_mask(2, torch.device("cpu")).tolist() == [[[[False, True], [False, False]]]]
    hidden = batches.pair_mask(torch.ones(1, 1), torch.tensor([[1, 0]]))
    assert hidden.tolist() == [[[[False, True]]]]


@pytest.mark.parametrize(
    ("rows", "length", "plugin", "message"),
    [
        (3, 4, {"num_micro_batches": 2}, r"num_micro_batches=2 equal parts; got 3 samples"),
        (0, 4, {}, r"got 0 samples"),
        (2, 9, {}, r"got input_ids of 9 tokens"),
        (
            2,
            5,
            {"tp_degree": 2, "sequence_parallelism": True},
            "multiple of 2, at most 8; got input_ids of 5",
        ),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(rows: int, length: int, plugin: dict[str, Any], message: str) -> None:
    """Samples that micro batches do not share equally, and tokens that ranks do not, are named with their numbers."""
    with pytest.raises(DataError, match=message):
        batches.check(of_batches(**plugin), {"input_ids": torch.zeros(rows, length)})
