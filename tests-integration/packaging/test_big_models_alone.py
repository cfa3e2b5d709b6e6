"""What only accel-bigmodel, with the core, is enough for."""

from pathlib import Path
from typing import Any

import pytest

from accel_testing import requires

GENERATE = """
import importlib.util, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accel_bigmodel import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch

for stranger in ("accel", "accelerate", "accel_launch", "accel_plan", "accel_quant", "accel_trackers", "accel_verify"):
    assert importlib.util.find_spec(stranger) is None, stranger

folder = Path(sys.argv[1])
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)
torch.manual_seed(0)
plain = LlamaForCausalLM(config).eval()
plain.save_pretrained(folder, max_shard_size="30KB")
before = sorted(path.name for path in folder.iterdir())
assert len([name for name in before if name.endswith(".safetensors")]) > 1, before

with init_empty_weights():
    model = LlamaForCausalLM(config)
size = sum(parameter.nbytes for parameter in plain.parameters())
places = infer_auto_device_map(model, {"cpu": size * 2 // 3}, no_split_module_classes=["LlamaDecoderLayer"])
assert set(places.values()) == {"cpu", "disk"}, places
model = load_checkpoint_and_dispatch(model, folder, device_map=places).eval()
assert model.hf_device_map == places
assert any(parameter.is_meta for parameter in model.parameters())
assert model.lm_head.weight is model.model.embed_tokens.weight

prompt = torch.tensor([[1, 5, 9, 2], [1, 3, 3, 7]])
mask = torch.ones_like(prompt)
for sample in (False, True):
    outputs = []
    for one in (plain, model):
        torch.manual_seed(1)
        outputs.append(one.generate(
            prompt, attention_mask=mask, max_new_tokens=12, do_sample=sample,
            return_dict_in_generate=True, output_logits=True,
        ))
    wanted, found = outputs
    assert wanted.sequences.shape == (2, 16)
    assert torch.equal(wanted.sequences, found.sequences)
    assert all(torch.equal(one, other) for one, other in zip(wanted.logits, found.logits, strict=True))
assert sorted(path.name for path in folder.iterdir()) == before
print("bit-equal")
"""


@pytest.mark.full("every library at once")
@requires("transformers")
def test_a_language_model_generates_from_cpu_and_disk(
    environment: Any, wheels: dict[str, Path], tmp_path: Path
) -> None:
    """With accel-bigmodel alone: map, load and dispatch with a disk part, and generate what the plain model does."""
    environment.install(wheels["accel-core"], wheels["accel-bigmodel"])
    done = environment.run("python", "-I", "-c", GENERATE, tmp_path / "checkpoint")
    assert done.stdout.splitlines()[-1] == "bit-equal"
