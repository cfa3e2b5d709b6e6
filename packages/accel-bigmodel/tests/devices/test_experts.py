"""Experts that come to a GPU one by one through a cache."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
from accel_testing.requires import requires

DEVICE = torch.device("cuda", 0)
WIDTH, COUNT, CHOICES, LAYERS = 512, 8, 3, 3
ONE = 4 * WIDTH * WIDTH
"""Bytes of one expert."""


class Experts(nn.Module):
    """Experts in one stack, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = COUNT
        self.weight = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum what the chosen experts make of each token."""
        output = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            choice, rows = torch.where((numbers == number).T)
            if len(rows):
                output = output.index_add(0, rows, tokens[rows] @ self.weight[number] * weights[rows, choice, None])
        return output


class Listed(nn.ModuleList):
    """Experts that are modules of a list."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum what the chosen experts make of each token."""
        output = torch.zeros_like(tokens)
        for number in numbers.unique().tolist():
            choice, rows = torch.where((numbers == number).T)
            output = output.index_add(0, rows, self[number](tokens[rows]) * weights[rows, choice, None])
        return output


class Mixture(nn.Module):
    """A layer that adds what some experts make of its input."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, COUNT), kind()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Route tokens (tokens, width) to their experts."""
        weights, numbers = self.router(tokens).softmax(-1).topk(CHOICES, -1)
        return tokens + self.experts(tokens, numbers, weights)


def mixtures(kind: type[nn.Module]) -> nn.Sequential:
    """Make a model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Mixture(kind) for _ in range(LAYERS))).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", [Experts, Listed])
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["current stream", "own stream"])
@torch.no_grad()
def test_experts_compute_what_they_do_in_memory(
    own: bool, lookahead: bool, place: str, kind: type[nn.Module], tmp_path: Path
) -> None:
    """Beside a busy device, an expert's memory is not given to the next one while kernels will still read it."""
    plain = mixtures(kind)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    plain = plain.to(DEVICE)
    xs = [torch.randn(rows, WIDTH, device=DEVICE) for rows in (1, 5, 2, 7)]
    expected = [plain(x) for x in xs]
    with init_empty_weights():
        model = mixtures(kind)
    places = {f"{n}.{part}": where for n in range(LAYERS) for part, where in (("router", 0), ("experts", place))}
    settings: dict[str, Any] = {"expert_lookahead": True} if lookahead else {}
    model = load_checkpoint_and_dispatch(model, tmp_path, places, expert_cache=4 * ONE, **settings)
    factor = torch.eye(4096, device=DEVICE)
    product = torch.mm(factor, factor)
    torch.cuda.synchronize()
    outputs = []
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)) if own else contextlib.nullcontext():
        for x in xs:
            for layer in model:
                for _ in range(10):
                    torch.mm(factor, factor, out=product)
                x = layer(x)
            outputs.append(x)
    torch.cuda.synchronize()
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted)
    report = model.expert_report()
    assert report.held <= 4 * ONE
    assert report.misses > 0


@requires("transformers")
@torch.no_grad()
def test_a_mixture_of_transformers_generates_the_same(tmp_path: Path) -> None:
    """With the kernels that transformers chooses for a GPU a block is close, and with its loop text is the same."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip

    def made(**settings: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **settings).eval()

    torch.manual_seed(0)
    save_file({key: value.clone() for key, value in made().state_dict().items()}, tmp_path / "model.safetensors")
    words = torch.arange(3, 15, device=DEVICE).view(2, 6)
    for settings in ({}, {"experts_implementation": "eager"}):
        with init_empty_weights():
            empty, model = made(**settings), made(**settings)
        plain = load_checkpoint_and_dispatch(empty, tmp_path, {"": 0})
        model = load_checkpoint_and_dispatch(model, tmp_path, "auto", expert_cache="256KiB")
        hidden = torch.randn(2, 6, 128, device=DEVICE, dtype=torch.bfloat16)
        wanted = plain.model.layers[0].mlp(hidden).float()
        found = model.model.layers[0].mlp(hidden).float()
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
        if settings:
            assert torch.equal(model(words).logits, plain(words).logits)
            arguments = {"max_new_tokens": 16, "do_sample": False}
            assert torch.equal(model.generate(words, **arguments), plain.generate(words, **arguments))
        assert model.expert_report().held <= 2**18
