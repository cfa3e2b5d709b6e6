"""diffusers on a simulated accelerator: whole models and single layers come from the CPU, device maps spread a model.

The device computes on the CPU but has a memory of its own: what lies on it is counted, and an operation on tensors of
two devices is refused.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "simulated_device"))

import simulated
import torch
from diffusers import DiTPipeline, DiTTransformer2DModel
from images import draw, save_pipeline

FOLDER = Path("pipeline")
FIRST, SECOND = f"{simulated.NAME}:0", f"{simulated.NAME}:1"


def _places(model: torch.nn.Module) -> list[str]:
    return sorted({str(tensor.device) for tensor in model.parameters()})


def _result(sim: Any, pipeline: DiTPipeline, expected: torch.Tensor) -> dict[str, Any]:
    """Draw twice and tell what was drawn, where the models lay and what the first device held at most."""
    before = sim.memory_allocated(0)
    sim.reset_peak_memory_stats(0)
    images = [draw(pipeline), draw(pipeline)]
    return {
        "equal": all(torch.equal(image, expected) for image in images),
        "sum": float(images[0].double().sum()),
        "runs on": str(pipeline._execution_device),
        "transformer": _places(pipeline.transformer),
        "autoencoder": _places(pipeline.vae),
        "peak": sim.max_memory_allocated(0) - before,
    }


def _model_offload(sim: Any, expected: torch.Tensor) -> dict[str, Any]:
    pipeline = DiTPipeline.from_pretrained(FOLDER)
    pipeline.enable_model_cpu_offload(device=FIRST)
    found = _result(sim, pipeline, expected)
    pipeline.remove_all_hooks()
    return {**found, "without hooks": torch.equal(draw(pipeline.to(FIRST)), expected)}


def _sequential_offload(sim: Any, expected: torch.Tensor) -> dict[str, Any]:
    pipeline = DiTPipeline.from_pretrained(FOLDER)
    pipeline.enable_sequential_cpu_offload(device=FIRST)
    return _result(sim, pipeline, expected)


def _device_map(sim: Any, device_map: dict[str, str], expected: torch.Tensor) -> dict[str, Any]:
    """Spread the transformer; the autoencoder stays on the first device, where the pipeline runs."""
    transformer = DiTTransformer2DModel.from_pretrained(
        FOLDER / "transformer", device_map=device_map, offload_folder="offload"
    )
    pipeline = DiTPipeline.from_pretrained(FOLDER, transformer=transformer)
    pipeline.vae.to(FIRST)
    found = _result(sim, pipeline, expected)
    return {**found, "map": {name: str(place) for name, place in transformer.hf_device_map.items()}}


def _pipeline_map(sim: Any, expected: torch.Tensor) -> dict[str, Any]:
    """Give the models to two devices by their size."""
    pipeline = DiTPipeline.from_pretrained(FOLDER, device_map="balanced", max_memory={0: 500_000, 1: 450_000})
    found = _result(sim, pipeline, expected)
    return {**found, "map": {name: str(place) for name, place in pipeline.hf_device_map.items()}}


def main() -> dict[str, Any]:
    """Run every case and return what came out."""
    sim = simulated.set_up()
    save_pipeline(FOLDER)
    whole = DiTPipeline.from_pretrained(FOLDER).to(FIRST)
    expected = draw(whole)
    whole.to("cpu")
    blocks = [f"transformer_blocks.{index}" for index in range(4)]
    outer = dict.fromkeys(("pos_embed", "norm_out", "proj_out_1", "proj_out_2"), FIRST)
    devices = {**outer, **dict(zip(blocks, (FIRST, SECOND, SECOND, FIRST), strict=True))}
    offloaded = {**outer, **dict(zip(blocks, (FIRST, SECOND, "cpu", "disk"), strict=True))}
    return {
        "model offload": _model_offload(sim, expected),
        "sequential offload": _sequential_offload(sim, expected),
        "device map": _device_map(sim, devices, expected),
        "device map with CPU and disk": _device_map(sim, offloaded, expected),
        "balanced": _pipeline_map(sim, expected),
    }


if __name__ == "__main__":
    simulated.tell(main)
