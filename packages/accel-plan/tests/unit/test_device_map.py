"""Plans account for every byte of every device."""

import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_core.errors import ConfigurationError, DeviceMapError
from accel_core.modules.sizes import written_size
from accel_plan.device_map import Plan, plan_device_map
from accel_plan.experts import ExpertShare
from accel_plan.headroom import Workload, activation_bytes


@pytest.fixture
def model() -> nn.Module:
    """Six layers of 400 bytes and one buffer."""
    layers = nn.Sequential(*[nn.Linear(10, 10, bias=False, device="meta") for _ in range(6)])
    layers.register_buffer("scale", torch.empty(5, device="meta"))
    return layers


def test_a_plan_accounts_for_every_byte(model: nn.Module) -> None:
    """Weights, reserve, headroom and the free rest of each device make up its limit; the parts make up the model."""
    plan = plan_device_map(model, {0: 1500, "cpu": 1000}, headroom=100)
    assert plan.nbytes == 6 * 400 + 20 == sum(share.weights for share in plan.shares)
    first, *_ = plan.shares
    assert (first.device, first.limit, first.reserve, first.headroom) == (0, 1500, 400, 100)
    assert first.free == 1500 - first.weights - 400 - 100 >= 0
    assert plan.main == 0
    assert set(plan.device_map.values()) == {0, "cpu", "disk"}


def test_a_plan_survives_json(model: nn.Module) -> None:
    """Reading what was written gives an equal plan; anything else is refused."""
    plan = plan_device_map(model, {0: 1500, "cpu": 1000})
    assert Plan.from_json(plan.to_json()) == plan
    large = plan.to_json().replace('"limit": 1500', f'"limit": {"9" * 4000}')
    for text in ('{"parts": 3}', "[" * 10000 + "]" * 10000, "9" * 5000, large, plan.to_json().replace("1500", "[]")):
        with pytest.raises(ConfigurationError, match="not a plan"):
            Plan.from_json(text)


def test_a_plan_is_told_as_table_words_and_picture(model: nn.Module) -> None:
    """The table has a row per device, words name each purpose, the picture, also a notebook's, is to scale."""
    plan = plan_device_map(model, {0: 1500, "cpu": 10_000}, headroom="0.1KB")
    lines = plan.table().splitlines()
    assert [line.split()[0] for line in lines[2:]] == [str(share.device) for share in plan.shares]
    assert "kept for the largest offloaded layer" in plan.explain(0)
    assert "activations" in plan.explain(0)
    with pytest.raises(ConfigurationError, match=r"no device 7; it has \[0, "):
        plan.explain(7)
    assert repr(plan_device_map(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"cpu": "1KiB"})) == (
        "Plan(2 parts of 576 B; cpu: 576 B)"
    )
    assert plan._repr_html_() == plan.svg()
    drawing = ElementTree.fromstring(plan.svg())
    bars = [e for e in drawing.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    widths = [float(bar.attrib["width"]) for bar in bars]
    total = sum(share.weights + share.reserve + share.headroom + max(share.free or 0, 0) for share in plan.shares)
    texts = {text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")}
    labels = {f"{device}: {plan.explain(device).partition(': ')[2].partition('. ')[0]}" for device in (0, "cpu")}
    assert labels | {"weights", "reserve", "headroom", "free"} <= texts
    assert any("0-" in label for label in labels)
    assert sum(widths) / max(widths) == pytest.approx(total / max(p for p in (plan.shares[1].free or 0, 0)), rel=0.01)


@pytest.mark.parametrize(("headroom", "expected"), [(100, 100), (0.1, 150), ("1KB", 1000), (None, 0)])
def test_headroom_is_bytes_or_a_fraction(model: nn.Module, headroom: float | str | None, expected: int) -> None:
    """Whole numbers are bytes, fractions are of the limit; only accelerators keep it."""
    plan = plan_device_map(model, {0: 1500, 1: 5000, "cpu": 10_000}, headroom=headroom)
    assert plan.shares[0].headroom == expected
    assert plan.shares[2].headroom == 0


def test_impossible_plans_name_the_numbers(model: nn.Module) -> None:
    """Headroom above a limit, a fraction above one, too low limits and models that cannot be traced are refused."""
    with pytest.raises(DeviceMapError, match=r"no room for weights.*1.95 KiB"):
        plan_device_map(model, {0: 1500}, headroom=2000)
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        plan_device_map(model, {0: 1500}, headroom=1.5)
    with pytest.raises(DeviceMapError, match=r"No accelerator has room for the largest layer.*400 B"):
        plan_device_map(model, {0: 300, "cpu": 10_000})
    with pytest.raises(ConfigurationError, match=r"cannot be traced.*example inputs"):
        activation_bytes(nn.Bilinear(2, 2, 2), Workload(1, 1))


def test_traced_headroom_counts_live_bytes() -> None:
    """A chain of layers keeps two activations alive at once; caches that the forward returns count to its end."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 16)
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])

        def forward(self, tokens: torch.Tensor, keep: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
            x, kept = self.embed(tokens), []
            for layer in self.layers:
                x = layer(x)
                if keep:
                    kept.append(x)
            return x, kept

    model = Chain()
    one = 3 * 8 * 16 * 4
    assert activation_bytes(model, Workload(batch=3, sequence=8)) == 2 * one
    tokens = torch.zeros(3, 8, dtype=torch.long)
    assert activation_bytes(model, Workload(args=(tokens, True))) == 5 * one
    assert activation_bytes(model, Workload(3, 8), torch.float16) == one
    model.embed.eval()
    plan = plan_device_map(model, {0: 100_000}, headroom=Workload(3, 8))
    assert model.training
    assert model.layers[0].training
    assert not model.embed.training
    assert plan.shares[0].headroom == 2 * one


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (2048, "2.00 KiB"), (3 * 2**30, "3.00 GiB"), (2**41, "2.00 TiB")]
)
def test_sizes_are_written_with_a_unit(count: int, text: str) -> None:
    """Bytes are written in the largest unit that leaves a number above one."""
    assert written_size(count) == text


class Experts(nn.Module):
    """Four experts of 400 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.empty(4, 10, 10, device="meta"))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the tokens."""
        return tokens


def mixture(choices: int | None = 2) -> nn.Module:
    """Three layers: a router of 160 bytes, which stays with its block, and experts."""
    layers = [
        nn.ModuleDict({"router": nn.Linear(10, 4, bias=False, device="meta"), "experts": Experts()}) for _ in range(3)
    ]
    model = nn.Sequential(*layers)
    if choices is not None:
        model.config = SimpleNamespace(num_experts_per_tok=choices)  # type: ignore[assignment]
    return model


def test_a_plan_with_a_cache_says_what_a_token_costs() -> None:
    """Dense parts and the cache share a device, every byte is accounted for, experts are on the disk, JSON keeps it."""
    plan = plan_device_map(mixture(), {0: 2000, "cpu": 5000}, expert_cache=1200, headroom=100)
    assert plan.device_map == {
        f"{number}.{name}": place for number in range(3) for name, place in (("router", 0), ("experts", "disk"))
    }
    assert plan.nbytes == 3 * (160 + 1600) == sum(share.weights for share in plan.shares)
    assert (plan.shares[0].weights, plan.shares[0].headroom) == (480, 1300)
    assert plan.experts == ExpertShare(1200, 480, 4800, 12, 400, 3 * 2 * 400)
    assert Plan.from_json(plan.to_json()) == plan
    words = plan.experts.explain()
    for part in (
        "480 B are dense",
        "holds 25%",
        "2.34 KiB while the cache is empty",
        "1.76 KiB once",
    ):
        assert part in words
    half = plan_device_map(mixture(None), {"cpu": 5000}, expert_cache=1200, dtype="float16")
    assert half.experts == ExpertShare(1200, 240, 2400, 12, 200, None)
    assert "does not say how many" in half.experts.explain()
    assert half.shares[0].headroom == 0
    assert "pages of the page cache" in half.explain("disk")


@pytest.mark.parametrize(
    ("size", "limit", "text"), [(399, 2000, "holds at least one"), (2001, 2000, "has to fit its device")]
)
def test_caches_that_do_not_fit_are_refused(size: int, limit: int, text: str) -> None:
    """Below one expert, above the device, or without experts."""
    with pytest.raises(ConfigurationError, match=text):
        plan_device_map(mixture(), {0: limit, "cpu": 5000}, expert_cache=size)
    with pytest.raises(ConfigurationError, match="no experts were found"):
        plan_device_map(nn.Linear(2, 2), expert_cache=size)


def test_a_tie_that_a_model_declares_by_name_counts_once() -> None:
    """A weight that is tied by names alone is in the plan once, as it is where it is loaded."""
    model = nn.Module()
    model.embed, model.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    assert plan_device_map(model, {"cpu": "1MB"}).nbytes == 2 * 16 * 8 * 4
    model._tied_weights_keys = {"head.weight": "embed.weight"}
    assert plan_device_map(model, {"cpu": "1MB"}).nbytes == 16 * 8 * 4
