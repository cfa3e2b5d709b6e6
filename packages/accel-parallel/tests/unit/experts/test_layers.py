"""Which modules are experts, and which engines do not share them out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core.errors import EngineUnavailableError
from accel_core.plugins.parallelism import ParallelismConfig
from accel_parallel.experts.layers import experts_of, is_experts, parameter_names
from accel_parallel.fsdp1.strategy import FullyShardedWrapperStrategy
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import requires


class Stacked(nn.Module):
    """Experts as the protocol has them."""

    def __init__(self, first: int = 4) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.zeros(first, 2, 2))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the tokens."""
        return tokens


class Listed(nn.ModuleList):
    """Experts that are modules, called as the protocol has it."""

    def __init__(self, count: int, told: int) -> None:
        super().__init__(nn.Linear(2, 2) for _ in range(count))
        self.num_experts = told

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the tokens."""
        return tokens


class Router(Stacked):
    """It has a row for each expert too, and is called with tokens alone."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the tokens."""
        return tokens


def test_experts_are_known_by_their_form() -> None:
    """A router, a parameter of another first size, a plain list and one of another length are no experts."""
    assert is_experts(Stacked())
    assert is_experts(Listed(4, 4))
    others = Router(), Stacked(3), nn.ModuleList([nn.Linear(2, 2)] * 4), Listed(3, 4), nn.Linear(2, 2)
    assert not any(map(is_experts, others))
    net = nn.Sequential(Router(), Stacked(), Listed(2, 2))
    assert list(found := experts_of(net, 2)) == ["1", "2"]
    assert parameter_names(net, found) == ("1.weight", "2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias")


@requires("transformers")
def test_experts_of_transformers_are_known() -> None:
    """Of a mixture of transformers, its experts are found, and its router is not."""
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    net = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=8, num_key_value_heads=1, num_local_experts=4, **sizes)
    )
    assert list(experts_of(net, 4)) == ["model.layers.0.mlp.experts"]


def test_fsdp_1_is_refused_with_experts_that_ranks_share_out() -> None:
    """Before a process group exists, and by the name of the axis."""
    with pytest.raises(EngineUnavailableError, match=r"got the axes \['ep'\]"):
        FullyShardedWrapperStrategy.lay_out(0, 2, ParallelismConfig(ep_size=2), FullyShardedDataParallelPlugin())
