"""transformers and peft on models whose weights lie partly in CPU memory and partly on disk."""

from pathlib import Path
from typing import Any

import torch
from models import digest, llama, report, sequences
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

TOKENS = torch.stack([row["input_ids"] for row in sequences(2)])


def _folder(name: str) -> Path:
    """Save the model; each case has its own folder, because peft rewrites the files of a model on disk."""
    folder = Path(name)
    llama(layers=4).save_pretrained(folder)
    return folder


def _device_map() -> dict[str, str]:
    layers = {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(4)}
    return {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **layers}


def _load(folder: Path, **arguments: Any) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(
        folder, device_map=_device_map(), offload_folder="offload", dtype=torch.float32, **arguments
    )
    return model.eval()


def _generate(model: Any) -> dict[str, Any]:
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
        tokens = model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    return {"logits": logits.double().abs().sum().item(), "tokens": tokens.tolist()}


def _reload(folder: Path) -> dict[str, Any]:
    model = _load(folder)
    found = _generate(model)
    model.save_pretrained("again")
    back = LlamaForCausalLM.from_pretrained("again", dtype=torch.float32)
    return {
        **found,
        "map": {name: str(place) for name, place in model.hf_device_map.items()},
        "placed": sorted({str(tensor.device) for tensor in model.parameters()}),
        "weights": digest(back),
        "same": digest(back) == digest(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)),
    }


def _auto(folder: Path) -> dict[str, Any]:
    model = LlamaForCausalLM.from_pretrained(folder, device_map="auto", dtype=torch.float32)
    return {**_generate(model), "map": str(getattr(model, "hf_device_map", None))}


def _limited(folder: Path) -> dict[str, Any]:
    """Let the map follow from a limit in words, which leaves layers for the disk."""
    model = LlamaForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": "12KB"}, offload_folder="offload3", dtype=torch.float32
    )
    return {**_generate(model.eval()), "map": {name: str(place) for name, place in model.hf_device_map.items()}}


def _lora(model: Any, seed: int) -> PeftModel:
    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


def _adapters(folder: Path) -> dict[str, Any]:
    whole = _lora(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), 3)
    whole.save_pretrained("adapter")
    expected = _generate(whole)
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), "adapter")
    wrapped = {f"base_model.model.{name}": place for name, place in _device_map().items()}
    offloaded = PeftModel.from_pretrained(_load(folder), "adapter", device_map=wrapped, offload_folder="offload2")
    on_disk = _generate(offloaded)
    merged = loaded.merge_and_unload()
    merged_on_disk = offloaded.merge_and_unload()
    return {
        "whole": expected,
        "offloaded": on_disk,
        "offloaded equals whole": on_disk == expected,
        "merged": digest(merged),
        "outputs": _generate(merged),
        "outputs from disk": _generate(merged_on_disk),
    }


if __name__ == "__main__":
    report(
        {
            "reload": _reload(_folder("first")),
            "auto": _auto(_folder("second")),
            "adapters": _adapters(_folder("third")),
            "limited": _limited(_folder("fourth")),
        }
    )
