"""Blocks that are computed again in the backward pass."""

import copy

import pytest
import torch

from accel_core.errors import StateError
from accel_parallel.sharding.recomputing import recompute

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model():
    """Make a small language model that keeps a cache by default, as those of transformers do."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_is_not_filled_twice(model, attention, padded):
    """Gradients are those of the model that keeps its activations, and the cache stays empty."""
    model.set_attn_implementation(attention)
    twin = copy.deepcopy(model)
    recompute(twin.model.layers, offload=False)
    tokens = torch.randint(64, (2, 16))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0 if padded else 1
    for each in (model, twin):
        output = each(input_ids=tokens, attention_mask=mask, labels=tokens)
        output.loss.backward()
    assert output.past_key_values.get_seq_length() == 0
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # newer transformers: `cache`
def test_a_cache_that_holds_something_is_refused(model):
    """Tokens of a prefix are not left out, and without gradients they are read as ever."""
    prefix = model(input_ids=torch.randint(64, (2, 3)), use_cache=True).past_key_values
    recompute(model.model.layers, offload=False)
    tokens = torch.randint(64, (2, 4))
    with pytest.raises(StateError, match="got one with 3 tokens"):
        model(input_ids=tokens, past_key_values=prefix)
    with torch.no_grad():
        assert model(input_ids=tokens, past_key_values=prefix).past_key_values.get_seq_length() == 7
