"""diffusers: a pipeline whose parts are offloaded, and models that are spread by maps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMPipeline, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from images import draw, save_pipeline, unet
from models import report

from accelerate import cpu_offload, dispatch_model


def _pipeline() -> dict[str, Any]:
    folder = Path("pipeline")
    DDIMPipeline(unet(), DDIMScheduler(num_train_timesteps=20)).save_pretrained(folder)
    expected = draw(DDIMPipeline.from_pretrained(folder))
    offloaded = DDIMPipeline.from_pretrained(folder)
    cpu_offload(offloaded.unet, execution_device="cpu")
    found = draw(offloaded)
    return {"sum": float(expected.sum()), "offloaded": float(found.sum()), "same": torch.equal(found, expected)}


def _mapped() -> dict[str, Any]:
    """Spread models over the CPU and the disk, by a map, a word and for a whole pipeline."""
    folder = Path("mapped")
    save_pipeline(folder)
    expected = draw(DiTPipeline.from_pretrained(folder))
    places = {"pos_embed": "cpu", "norm_out": "cpu", "proj_out_1": "cpu", "proj_out_2": "disk"}
    places |= {f"transformer_blocks.{index}": "disk" if index % 2 else "cpu" for index in range(4)}
    transformer = DiTTransformer2DModel.from_pretrained(
        folder / "transformer", device_map=places, offload_folder="offload"
    )
    autoencoder = AutoencoderKL.from_pretrained(folder / "vae", device_map="auto")
    spread = draw(DiTPipeline.from_pretrained(folder, transformer=transformer, vae=autoencoder))
    by_word = draw(DiTPipeline.from_pretrained(folder, device_map="cpu"))
    balanced = DiTPipeline.from_pretrained(folder, device_map="balanced")
    return {
        "sum": float(expected.double().sum()),
        "equal": [torch.equal(found, expected) for found in (spread, by_word, draw(balanced))],
        "placed": sorted({str(tensor.device) for tensor in transformer.parameters()}),
        "chosen": [str(autoencoder.hf_device_map), str(balanced.hf_device_map)],
    }


class _Call(torch.nn.Module):
    """Calls a transformer with plain arguments, which is what `torch.jit.trace` takes."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, x: torch.Tensor, step: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Return the noise."""
        noise: torch.Tensor = self.transformer(x, timestep=step, class_labels=label, return_dict=False)[0]
        return noise


@torch.no_grad()
def _graphs() -> dict[str, Any]:
    """Export and compile a pipeline's hooked transformer, and trace one that waits on the CPU."""
    folder = Path("graphs")
    save_pipeline(folder)
    expected = draw(DiTPipeline.from_pretrained(folder))
    pipeline = DiTPipeline.from_pretrained(folder)
    hooked = dispatch_model(pipeline.transformer, {"": "cpu"}, force_hooks=True)
    inputs = torch.rand(2, 4, 4, 4), torch.tensor([1, 1]), torch.tensor([1, 2])
    noise = _Call(hooked)(*inputs)
    exported = torch.export.export(_Call(hooked), inputs).module()
    waiting = DiTPipeline.from_pretrained(folder).transformer
    traced = torch.jit.trace(_Call(cpu_offload(waiting, execution_device="cpu")), inputs, check_trace=False)
    found = {"exported": _is_same(lambda: exported(*inputs), noise), "traced": _is_same(lambda: traced(*inputs), noise)}
    hooked.compile(fullgraph=True, backend="eager")
    return {**found, "compiled whole": _is_same(lambda: draw(pipeline), expected)}


def _is_same(call: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    try:
        return torch.equal(call(), expected)
    except RuntimeError:  # the original traces empty weights, and leaves graphs
        return False


if __name__ == "__main__":
    report({"pipeline": _pipeline(), "device maps": _mapped(), "graphs": _graphs()})
