"""Methods other than `forward` of models whose parameters are sharded or split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from several_ranks import advance, assert_trained, blocks, fsdp, split
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_core.accelerator import Accelerator
from accel_core.errors import AccelError, EngineUnavailableError
from accel_core.state import reset_all
from accel_parallel.sharding import supports
from accel_testing import requires, world

pytestmark = requires("torch:2.8")  # the first whose FSDP2 computes in shards on a CPU

STEPS, ROWS = 3, 4


class Block(nn.Module):
    """A layer with a shortcut around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return four numbers for four."""
        return x + self.linear(x).tanh() * self.weight.to(x.dtype)


class Model(nn.Module):
    """Methods of a class that the model is derived from."""

    blocks: nn.ModuleList

    def through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with parameters of blocks alone."""
        for block in self.blocks:
            x = block(x)
        return x

    def describe(self, x: torch.Tensor) -> str:
        """Compute with no parameter."""
        return f"{type(self).__name__} for {x.shape[-1]} numbers"


class Net(Model):
    """Blocks between two layers, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with what no block has, and with blocks."""
        return self.through_blocks(self.embed(x))

    @torch.no_grad()
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Run forward passes, and compute after them."""
        y: torch.Tensor = self.head(self(self(x)))
        return y

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with the model's own parameter before anything else."""
        return self.encode(x * self.scale)

    def sample(self) -> torch.Tensor:
        """Do so without being given a tensor."""
        return torch.ones(4) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return four numbers for four."""
        y: torch.Tensor = self.head(self.encode(x)) * self.scale
        return y


def _start(engine: str, mixed_precision: str = "no", **given: Any) -> Accelerator:
    arguments: dict[str, Any] = {"mixed_precision": mixed_precision}
    if engine.startswith("fsdp"):
        states = {"state_dict_type": "FULL_STATE_DICT"}
        arguments["fsdp_plugin"] = fsdp(int(engine[4]), **blocks("Block"), **states, **given)
    if engine.endswith("tp"):
        plan = {"embed": "colwise_rep", "blocks.*.linear": "colwise_rep"}
        arguments["parallelism_config"] = split(plan, dp_shard_size=2 if engine != "tp" else 1)
    return Accelerator(cpu=True, **arguments)


def _loss(net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    """Return a loss of a forward pass and of other methods, in another order each step."""
    parts = [net.encode, net, net.scaled, net.through_blocks]
    outputs = [part(x) for part in (*parts[step:], *parts[:step])]
    return sum((output.square().mean() for output in outputs), (net.predict(x) * net.encode(x)).mean())


def _train(net: Any, optimizer: Any, backward: Callable[[torch.Tensor], object], part: slice) -> None:
    batches = torch.randn(STEPS, ROWS, 4, generator=torch.Generator().manual_seed(5))
    for step, batch in enumerate(batches):
        # What a method returns may be all that a loss is made of.
        backward(_loss(net, batch[part], step) if step else net.encode(batch[part]).square().mean())
        optimizer.step()
        optimizer.zero_grad()


_HALF = {"mixed_precision": "bf16"}
_HALF_EXACT = 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("engine", "ranks", "replicas", "given"),
    [
        ("fsdp2", 2, 2, {"reshard_after_forward": True}),
        ("fsdp2", 2, 2, {"reshard_after_forward": False}),
        pytest.param("fsdp2", 2, 2, _HALF, id="inputs in float32 meet weights gathered in bf16"),
        ("tp", 2, 1, {}),
        pytest.param("fsdp2tp", 4, 2, {}, marks=requires("torch:2.10")),
    ],
)
@world("ranks")
def test_methods_train_as_in_one_process(engine: str, ranks: int, replicas: int, given: dict[str, Any]) -> None:
    """Losses of methods, beside and between forward passes, have the gradients of one process."""
    tolerance = _HALF_EXACT if "mixed_precision" in given else 1e-6
    alone, net, accelerator = Net(), Net(), _start(engine, **given)
    _train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), torch.Tensor.backward, slice(None))
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    number, rows = accelerator.process_index * replicas // ranks, ROWS // replicas
    _train(net, optimizer, accelerator.backward, slice(number * rows, (number + 1) * rows))
    assert_trained(accelerator, net, alone.state_dict(), atol=tolerance)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@world(2)
def test_methods_without_computation_run_on_one_rank(engine: str) -> None:
    """A method that gathers nothing waits for nobody, whatever it is given."""
    accelerator = _start(engine)
    net: Any = accelerator.prepare(Net())
    if accelerator.is_main_process:
        assert net.describe(torch.ones(4)) == f"{type(accelerator.unwrap_model(net)).__name__} for 4 numbers"
    accelerator.wait_for_everyone()


@world(2)
def test_a_parameter_that_nothing_gathers_is_named() -> None:
    """A method that is given no tensor and reads the model's own parameter names the way, and torch's way works."""
    net: Any = _start("fsdp2").prepare(Net())
    with pytest.raises(EngineUnavailableError, match=r"Net\.sample\(\), which reads .*\.register_fsdp_forward_method"):
        net.sample()
    torch.testing.assert_close(net.encode(torch.ones(1, 4)), Net().encode(torch.ones(1, 4)))


@pytest.mark.parametrize("name", ["encode", "scaled", "through_blocks"])
@world(2)
def test_fsdp1_refuses_methods_that_compute_with_pieces(name: str) -> None:
    """Each is named on every rank before a collective, training goes on, and torch's way to call it works."""
    net: Any = _start("fsdp1").prepare(Net())
    x, alone = torch.ones(1, 4), Net()
    for _ in range(2):
        with pytest.raises(EngineUnavailableError, match=rf"got \w+\.{name}\(\), which computes with pieces"):
            getattr(net, name)(x)
        torch.testing.assert_close(net(x), alone(x))
        net(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(net.through_blocks(x), alone.through_blocks(x))
        with FullyShardedDataParallel.summon_full_params(net, recurse=False, writeback=False):
            torch.testing.assert_close(getattr(net, name)(x), getattr(alone, name)(x))


def _tiny(kind: str) -> Any:
    """Return a small model of transformers."""
    import transformers

    torch.manual_seed(6)
    sizes: dict[str, Any] = {"vocab_size": 16, "num_layers": 2, "num_heads": 2, "d_model": 8, "d_kv": 4, "d_ff": 8}
    if kind == "t5":
        return transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **sizes))
    sizes = {"vocab_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=1, **sizes))


@requires("transformers")
@pytest.mark.parametrize("kind", ["t5", "gpt2"])
@world(2, quiet=20, preload=("transformers.modeling_utils",))
def test_generation_under_fsdp2_is_that_of_one_process(kind: str) -> None:
    """A library's `generate` works on the prepared model, an encoder that it calls by itself too."""
    model = _tiny(kind)
    alone = copy.deepcopy(model).eval()
    net = Accelerator(cpu=True, fsdp_plugin=fsdp()).prepare(model).eval()
    given = {"max_new_tokens": 5, "do_sample": False}
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.equal(net.generate(tokens, **given), alone.generate(tokens, **given))
    with pytest.raises(EngineUnavailableError, match=r"got resize_token_embeddings of a prepared "):
        net.resize_token_embeddings(20)


class Resizable(Net):
    """A model whose first layer can be replaced, as transformers' can."""

    def resize_token_embeddings(self, size: int) -> None:
        """Replace it."""
        self.embed = nn.Linear(size, 4)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "tp"])
@world(2)
def test_resizing_embeddings_of_a_prepared_model_is_refused(engine: str) -> None:
    """`resize_token_embeddings` names the remedy, and replaces nothing."""
    net: Any = _start(engine).prepare(Resizable())
    before = [id(parameter) for parameter in net.parameters()]
    with pytest.raises(EngineUnavailableError, match=r"of a prepared \w*Resizable\. Call it before prepare\(\)"):
        net.resize_token_embeddings(5)
    assert [id(parameter) for parameter in net.parameters()] == before


def _double(net: Any, *, trains: bool) -> None:
    net.blocks[0].weight = nn.Parameter(net.blocks[0].weight.detach().double(), requires_grad=trains)


_CASES: list[tuple[Callable[[Any], object], Callable[[Any, torch.Tensor], torch.Tensor]]] = [
    (lambda net: _double(net, trains=True), lambda net, x: net(x)),
    (lambda net: _double(net, trains=False), lambda net, x: net(x)),
    (lambda net: net.embed.weight.register_hook(lambda gradient: 2 * gradient), lambda net, x: net(x)),
    (lambda net: None, lambda net, x: net.encode(x)),
    (lambda net: None, lambda net, x: net.scaled(x)),
    (lambda net: None, lambda net, x: net.resize_token_embeddings(4) or net(x)),
]
"""What is done to a model before `prepare`, and what is computed with it afterwards, for each row of the table."""


@pytest.mark.parametrize("number", range(3), ids=supports.ENGINES)
@world(2, quiet=10)
def test_the_table_of_abilities_is_what_an_engine_gives(number: int) -> None:
    """Each row trains one step as in one process, or ends in one of our errors, as the table says."""
    found = []
    rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))
    for change, compute in _CASES:
        reset_all()
        alone, net = Resizable(), Resizable()
        accelerator = _start(("fsdp1", "fsdp2", "tp")[number])
        part = rows if number == 2 else rows[accelerator.process_index :][:1]
        for each in (alone, net):
            change(each)
        try:
            prepared = accelerator.prepare(net)
            optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
            advance(compute(prepared, part).square().mean(), optimizer, run=accelerator)
        except AccelError:
            found.append(False)
            continue
        advance(compute(alone, rows).square().mean(), torch.optim.SGD(alone.parameters(), lr=0.1))
        assert_trained(accelerator, prepared, alone.state_dict())
        found.append(True)
    assert found == [engines[number] for engines in supports.ABILITIES.values()]
