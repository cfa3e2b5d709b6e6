"""The Megatron-LM plugin gathers the arguments that Megatron-LM gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.options.option import Option, options_of
from accel_megatron import model_configs
from accel_megatron.options import MegatronOptions
from accel_megatron.plugin import MegatronLMPlugin


def _model(kind: str, name: str = "Model", **config: Any) -> Any:
    class_ = type(name, (), {})
    model = class_()
    model.config = SimpleNamespace(model_type=kind, return_dict=True, vocab_size=100, **config)
    return model


_SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
_ENDS = {"eos_token_id": 2, "tie_word_embeddings": False}
_LLAMA = {**_SIZES, **_ENDS, "intermediate_size": 96, "rms_norm_eps": 1e-5, "num_key_value_heads": 2}
_GPT2 = {**_ENDS, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": None}
_T5 = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
_BERT = {**_SIZES, "intermediate_size": 96, "layer_norm_eps": 1e-12}


@pytest.mark.parametrize("row", options_of(MegatronOptions), ids=lambda row: row.field)
def test_every_option_fills_its_field(monkeypatch: pytest.MonkeyPatch, row: Option) -> None:
    """Each MEGATRON_LM_* variable fills its field, and the default does where it is unset."""
    assert getattr(MegatronLMPlugin(), row.field) == row.default
    text = "1" if row.parser in (int, float) else "true" if row.default in (True, False) else "selective"
    monkeypatch.setenv(row.environment, text)
    assert getattr(MegatronLMPlugin(), row.field) == row.parser(text)


def test_arguments_carry_megatrons_names() -> None:
    """Fields with another name in Megatron-LM are translated, others pass; its own logging needs Megatron-LM."""
    plugin = MegatronLMPlugin(tp_degree=2, gradient_clipping=0.1, other_megatron_args={"extra": 1})
    arguments = plugin.megatron_lm_default_args
    assert arguments["tensor_model_parallel_size"] == 2
    assert arguments["clip_grad"] == 0.1
    assert arguments["extra"] == 1
    assert arguments["eval_iters"] == 100
    assert (plugin.DDP_impl, arguments["DDP_impl"]) == ("local", "local")
    assert MegatronLMPlugin().DDP_impl == "torch"
    with pytest.raises(MissingDependencyError, match="Megatron-LM"):
        MegatronLMPlugin(set_all_logging_options=True)


@pytest.mark.parametrize(("word", "flag"), [("fp16", "fp16"), ("bf16", "bf16"), ("no", None)])
def test_number_format(word: str, flag: str | None) -> None:
    """The number format switches one flag, and bf16 takes Megatron's own data parallelism."""
    plugin = MegatronLMPlugin()
    plugin.set_mixed_precision(word)
    flags = {name for name in ("fp16", "bf16") if plugin.megatron_lm_default_args.get(name)}
    assert flags == ({flag} if flag else set())
    assert plugin.DDP_impl == ("local" if word == "bf16" else "torch")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_are_translated(kind: type[torch.optim.Optimizer]) -> None:
    """Settings of an Adam, and the momentum of SGD, get Megatron-LM's names; an optimizer that it lacks is refused."""
    plugin = MegatronLMPlugin()
    plugin.set_optimizer_type(kind([torch.zeros(1)], lr=0.3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2))  # type: ignore[call-arg]
    expected = {
        "optimizer": "adam",
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_eps": 1e-6,
        "lr": 0.3,
        "weight_decay": 0.2,
    }
    assert {name: plugin.megatron_lm_default_args[name] for name in expected} == expected
    plugin.set_optimizer_type(torch.optim.SGD([torch.zeros(1)], lr=0.3, momentum=0.9))
    assert plugin.megatron_lm_default_args["sgd_momentum"] == 0.9
    with pytest.raises(ConfigurationError, match="Adagrad"):
        plugin.set_optimizer_type(torch.optim.Adagrad([torch.zeros(1)]))


def test_schedule_is_counted_per_run() -> None:
    """Parts and ranks multiply the batch and divide the schedule; samples give way to steps with a warning."""
    plugin = MegatronLMPlugin(train_samples=50, num_micro_batches=3)
    plugin.set_training_args(4, 2)
    assert plugin.megatron_lm_default_args["global_batch_size"] == 24
    with pytest.warns(UserWarning, match="train_samples"):
        plugin.set_scheduler_args(SimpleNamespace(total_num_steps=10, warmup_num_steps=2))
    arguments = plugin.megatron_lm_default_args
    assert (arguments["train_iters"], arguments["lr_warmup_iters"], arguments["train_samples"]) == (5, 1, None)


def test_models_are_described() -> None:
    """Each kind has its own parser, with lengths from field, batch or model; a BERT says whether it pretrains."""
    batch = {"input_ids": torch.zeros(2, 9), "labels": torch.zeros(2, 5)}
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(_model("llama", **_LLAMA))
    assert plugin.megatron_lm_default_args["seq_length"] == 128
    plugin.set_network_size_args(_model("llama", **_LLAMA), batch)
    assert plugin.megatron_lm_default_args["seq_length"] == 9
    plugin = MegatronLMPlugin(decoder_seq_length=22)
    plugin.set_network_size_args(_model("gpt2", layer_norm_epsilon=1e-5, **_GPT2), batch)
    arguments = plugin.megatron_lm_default_args
    assert (arguments["seq_length"], arguments["tokenizer_type"]) == (22, "GPT2BPETokenizer")
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(_model("t5", n_positions=128, pad_token_id=0, **_T5), batch)
    arguments = plugin.megatron_lm_default_args
    assert (arguments["encoder_seq_length"], arguments["decoder_seq_length"]) == (9, 5)
    for name, pretrains in (("BertForMaskedLM", True), ("BertForSequenceClassification", False)):
        plugin = MegatronLMPlugin()
        plugin.set_network_size_args(_model("megatron-bert", name, num_labels=3, **_BERT))
        assert plugin.megatron_lm_default_args["pretraining_flag"] is pretrains


def test_mixture_of_experts_is_described() -> None:
    """The first layers are dense, the others hold experts."""
    config = {
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    }
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(_model("glm4_moe", **_LLAMA, **config))
    arguments = plugin.megatron_lm_default_args
    assert arguments["moe_layer_freq"] == [0, 1, 1]
    assert arguments["moe_shared_expert_intermediate_size"] == 64
    assert arguments["untie_embeddings_and_output_weights"] is True


def test_other_models_bring_their_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown kind of model is refused with those known; a registered parser makes it known."""
    monkeypatch.setattr(
        model_configs, "MODEL_CONFIGS_TO_MEGATRON_PARSERS", model_configs.MODEL_CONFIGS_TO_MEGATRON_PARSERS
    )
    plugin = MegatronLMPlugin()
    with pytest.raises(ConfigurationError, match=r"'zebra'.*llama"):
        plugin.set_network_size_args(_model("zebra"))

    @model_configs.add_model_config_to_megatron_parser("zebra")
    def parse_zebra(plugin: Any, model: Any, batch: Any) -> None:
        plugin.megatron_lm_default_args["stripes"] = True

    try:
        plugin.set_network_size_args(_model("zebra"))
        assert plugin.megatron_lm_default_args["stripes"] is True
    finally:
        del model_configs.MODEL_CONFIGS_TO_MEGATRON_PARSERS["zebra"]
