"""The table of optimizers that sharded parameters are refused to, against what each optimizer does with them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from several_ranks import LAYERS, WHOLE, fsdp, refused, split
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError
from accel_core.state import reset_all
from accel_parallel.sharding import optimizers
from accel_testing import requires, world

SCRIPT = Path(__file__).parents[1] / "optimizers.py"
PAGE = SCRIPT.parents[3] / "docs" / "reference" / "optimizers.md"
STEPS, ROWS = 3, 8
LONGER = {"schedulefree.RAdamScheduleFree": 8}
"""Steps of optimizers that do not move in the first ones."""
TRAINED = {"torch.Muon": ("weight",)}
"""Optimizers that take parameters of some names only; the others are frozen."""
OTHERS = {
    "transformers": ("transformers.optimization", ("Adafactor",)),
    "schedulefree": ("schedulefree", ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")),
    "bitsandbytes": (
        "bitsandbytes.optim",
        tuple(
            f"{each}8bit" for each in ("AdEMAMix", "Adagrad", "Adam", "AdamW", "LAMB", "LARS", "Lion", "RMSprop", "SGD")
        ),
    ),
    "torchao": ("torchao.optim", tuple(name.partition(".")[2] for name in optimizers.IN_BLOCKS)),
}
"""Optimizers of other libraries: where each has them, and what they are called."""
LOW_BIT = ("bitsandbytes", "torchao")
"""Libraries that keep large states in few bits."""
SETTINGS = {f"bitsandbytes.{name}8bit": {"lr": 1e-3, "momentum": 0.9} for name in ("LARS", "SGD")}
"""What optimizers have to be told."""


class Factors(nn.Module):
    """One parameter that no rank but the first has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x * self.factor


def model(name: str, features: int) -> nn.Sequential:
    """Return a model on which an optimizer is tried, with the same values each time."""
    torch.manual_seed(0)
    width, inner = (64, 256) if name.startswith(LOW_BIT) else (6, 8)
    net = nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, features), Factors())
    for own, parameter in net.named_parameters():
        parameter.requires_grad = own.endswith(TRAINED.get(name, ""))
    if name == "torch.SparseAdam":
        net = nn.Sequential(nn.Embedding(width, features, sparse=True))
    return net


def kinds() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizers of torch, and those of other libraries that are installed."""
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    known = {
        f"torch.{name}": kind
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    for library, (place, names) in OTHERS.items():
        if importlib.util.find_spec(library) is not None:
            module = importlib.import_module(place)
            known |= {f"{library}.{name}": getattr(module, name) for name in names}
    return known


def ways(kind: type[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return the default options of an optimizer, and those that choose another implementation of its step."""
    known = inspect.signature(kind).parameters
    return [{}, *({name: True} for name in ("foreach", "fused") if name in known)]


def make(name: str, net: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of what trains in a model."""
    made = kinds()[name]([p for p in net.parameters() if p.requires_grad], **options, **SETTINGS.get(name, {}))
    if name.startswith("schedulefree"):
        made.train()  # type: ignore[attr-defined]
    return made


def train(
    net: nn.Module, optimizer: Any, backward: Callable[..., None], part: slice, steps: int = STEPS, **given: Any
) -> None:
    """Train some steps on rows of each batch; a closure returns what `shared` makes of its loss."""
    torch.manual_seed(1)
    bare = getattr(net, "module", net)
    entry = bare[0]
    rows: torch.Tensor = torch.randn(steps, ROWS, getattr(entry, "in_features", 1)).to(next(net.parameters()).dtype)
    if isinstance(entry, nn.Embedding):
        rows = torch.randint(entry.num_embeddings, (steps, ROWS))
    for batch in rows:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((net(batch[part]) - 1) ** 2).mean()
            backward(loss)
            shared: torch.Tensor = given.get("shared", torch.Tensor.detach)(loss.detach())
            return shared

        loss = closure() if not isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS) else None
        optimizer.step() if loss is not None else optimizer.step(closure)


def arguments(engine: str, **given: Any) -> dict[str, Any]:
    """Return what makes an Accelerator use an engine."""
    found: dict[str, Any] = {}
    if engine.startswith("fsdp"):
        found["fsdp_plugin"] = fsdp(int(engine[4]), **WHOLE, **LAYERS, **given)
    if engine.endswith("tp"):
        shards = 2 if engine.startswith("fsdp") else 1
        found["parallelism_config"] = split({"0": "colwise", "2": "rowwise"}, dp_shard_size=shards)
    return found


def is_right(engine: str, name: str, options: dict[str, Any], **given: Any) -> bool:
    """Return whether an optimizer trains under an engine what it trains in one process, with no table in between."""
    low_bit = name.startswith(LOW_BIT)
    features = 64 if low_bit else 4 if engine.endswith("tp") else 5
    if name == "torch.SparseAdam" and engine != "dp":
        return False  # gradients of shards are dense, which it refuses
    # Steps of LBFGS make much of how sums were rounded, and end where a loss stays.
    exact = name == "torch.LBFGS" and engine == "dp"
    alone, ours = (model(name, features).to(torch.float64 if exact else torch.float32) for _ in range(2))
    train(alone, make(name, alone, options), lambda loss: loss.backward(), slice(None), LONGER.get(name, STEPS))
    accelerator = Accelerator(cpu=True, **arguments(engine, **given))
    try:
        net, optimizer = accelerator.prepare(ours, make(name, ours, options))
        # The mean of different rows is rounded in another order: a code of 8 bits can then be the next one.
        replicas = 1 if engine == "tp" or low_bit else 2
        number = dist.get_rank() * replicas // dist.get_world_size()
        rows = ROWS // replicas
        part = slice(number * rows, (number + 1) * rows)
        shared = functools.partial(accelerator.reduce, reduction="mean") if exact else torch.Tensor.detach
        train(net, optimizer, accelerator.backward, part, LONGER.get(name, STEPS), shared=shared)
        got = accelerator.get_state_dict(net)
        return all(torch.allclose(got[key], value, rtol=0, atol=1e-6) for key, value in alone.state_dict().items())
    except (AssertionError, RuntimeError, ValueError) as error:
        if isinstance(error, PreparationError) and "carried over" in str(error):
            raise  # a refusal of its own
        return False
    finally:
        reset_all()
        dist.barrier()


def refused_by(form: str) -> set[str]:
    """Return the names of what the table refuses, on several ranks, with a form of parameters."""
    forms = {"split": {"split", "several", "distributed"}, "distributed": {"several", "distributed"}}.get(form, {form})
    rows = {name: optimizers.row_of(kind) for name, kind in kinds().items()}
    return {name for name, row in rows.items() if row is not None and forms & set(row[1].forms)}


FULL = pytest.mark.full("a table under every engine")


@pytest.mark.parametrize(
    ("engine", "form", "ranks"),
    [
        pytest.param("dp", "copied", 2, marks=FULL),
        pytest.param("fsdp2", "distributed", 2, marks=requires("torch:2.8")),
        pytest.param("tp", "split", 2, marks=FULL),
        pytest.param("fsdp2tp", "split", 4, marks=[FULL, requires("torch:2.10")]),
        pytest.param("fsdp1", "flat", 2, marks=FULL),
    ],
)
@world("ranks", quiet=60)
def test_the_table_is_what_an_engine_gives(engine: str, form: str, ranks: int) -> None:
    """In every way to step, those optimizers train as in one process, closures too, that the table lets pass."""
    wrong = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "REFUSED", {})
        # Muon computes in bfloat16 what it orthogonalizes: rounding, which the order of sums changes, would hide what
        # is to be seen here.
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
        patch.setattr(torch, "bfloat16", torch.float32)  # which torch 2.15 asks for instead
        torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes most of the time
        for name, kind in kinds().items():
            for options in ways(kind):
                if form == "flat" and name.startswith(("torch.Adagrad", "schedulefree", *LOW_BIT)):
                    continue  # state from the start is a case of its own, and blocks in few bits are other ones
                if not is_right(engine, name, options):
                    wrong.add(name)
    assert wrong == refused_by(form), wrong ^ refused_by(form)


def test_the_table_names_every_optimizer_of_torch() -> None:
    """Each optimizer of the installed torch is in one of the two tables that the documentation shows."""
    assert {name for name in kinds() if name.startswith("torch.")} <= {*optimizers.REFUSED, *optimizers.EQUAL}
    assert not set(optimizers.EQUAL) & set(optimizers.REFUSED)


@pytest.mark.skipif(not PAGE.exists(), reason="only in the repository")
def test_the_page_of_optimizers_is_made_from_the_tables() -> None:
    """docs/reference/optimizers.md is what the script prints: change a row that these tests prove, run the script."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    assert PAGE.read_text() == done.stdout, f"Run {SCRIPT.name}."


@requires("torch:2.8")
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "tp"])
@world(2)
def test_what_the_table_names_is_refused_before_anything_changed(engine: str) -> None:
    """`prepare` names the optimizer, a subclass too, and what to use; model and optimizer stay as they were."""
    for name in refused_by({"fsdp1": "flat", "tp": "split"}.get(engine, "distributed")):
        net = model(name, 4)
        optimizer = make(name, net, {})
        optimizer.__class__ = type("Own", (type(optimizer),), {})
        accelerator = Accelerator(cpu=True, **arguments(engine))
        for prepared in ((net, optimizer), (optimizer,)):
            row = optimizers.row_of(kinds()[name])
            assert row is not None
            with refused(PreparationError, rf"got Own, a {row[0]}, which .*{row[1].instead}", accelerator, net):
                accelerator.prepare(*prepared)
        reset_all()


@world(2)
def test_state_from_the_start_does_not_follow_into_pieces() -> None:
    """Adagrad has state as soon as it is made: FSDP1 refuses it before, and trains it when made after the model."""
    alone, ours = model("torch.Adagrad", 5), model("torch.Adagrad", 5)
    train(alone, torch.optim.Adagrad(alone.parameters()), lambda loss: loss.backward(), slice(None))
    accelerator = Accelerator(cpu=True, **arguments("fsdp1", use_orig_params=True))
    with pytest.raises(PreparationError, match=r"got Adagrad with the state of 5 parameters\. Create it from"):
        accelerator.prepare(ours, torch.optim.Adagrad(ours.parameters()))
    net = accelerator.prepare(ours)
    optimizer = accelerator.prepare(torch.optim.Adagrad(net.parameters()))
    first = dist.get_rank() * ROWS // 2
    train(net, optimizer, accelerator.backward, slice(first, first + ROWS // 2))
    torch.testing.assert_close(accelerator.get_state_dict(net), dict(alone.state_dict()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW"])
@requires("torch:2.8")
@world(2)
def test_fused_steps_take_scaled_gradients(name: str) -> None:
    """In fp16, an optimizer made with `fused=True` trains what it trains without, where ranks split some layers."""
    states = []
    for fused in (False, True):
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", **arguments("tp"))
        net = model(name, 4)
        net, optimizer = accelerator.prepare(net, getattr(torch.optim, name)(net.parameters(), fused=fused))
        train(net, optimizer, accelerator.backward, slice(None))
        assert all(group["fused"] is fused for group in optimizer.param_groups)
        states.append(accelerator.get_state_dict(net))
        reset_all()
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)
