"""Plans on a machine with a GPU."""

from pathlib import Path

import pytest
import torch

from accel_plan import Plan
from accel_plan.__main__ import main
from accel_testing.requires import requires

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@requires("transformers")
def test_a_plan_uses_the_memory_of_the_device(tmp_path: Path) -> None:
    """Without limits a small model goes to the GPU, with limits as everywhere."""
    import transformers

    transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    assert main(["plan", str(tmp_path), "--json", str(tmp_path / "free.json")]) == 0
    assert set(Plan.from_json((tmp_path / "free.json").read_text()).device_map.values()) == {0}
    limits = "0=4MB,cpu=4MB,disk=1GB"
    assert main(["plan", str(tmp_path), "--max-memory", limits, "--json", str(tmp_path / "bound.json")]) == 0
    assert len(set(Plan.from_json((tmp_path / "bound.json").read_text()).device_map.values())) > 1
