"""Expert parallel: ranks that share out experts train as one process does, however tokens are routed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from several_ranks import WIDTH, Experts, Listed, Mixture, Net, advance, blocks, fsdp, refused
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from accel_core.accelerator import Accelerator
from accel_core.errors import EngineUnavailableError, PreparationError, StateError
from accel_core.mesh.spec import parse_layout
from accel_core.mesh.tensor import whole
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_parallel.checkpoint.merge import merge_weights
from accel_parallel.experts.dispatch import dispatch, routed, rows_of_all
from accel_testing import requires, world

COUNT, TOKENS = 4, 5
KINDS: tuple[type[Experts | Listed], ...] = (Experts, Listed)
ROUTING = {"as it comes": [0, 0, 0, 0], "all to two experts of one rank": [9, 8, 0, 0]}


def made(routing: str = "as it comes", count: int = COUNT, kind: type[Experts | Listed] = Experts) -> Any:
    """Return the same net of two mixtures on every rank."""
    torch.manual_seed(3)
    net = Net(entry=0, out=1, count=2, block=partial(Mixture, count=count, kind=kind))
    for block in net.blocks:
        block.bent += torch.tensor(ROUTING[routing][:count])
    return net


def batches(parts: int, steps: int) -> torch.Tensor:
    """Return what each part of the ranks reads in each step: (steps, parts, tokens, width)."""
    return torch.randn(steps, parts, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7))


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer."""
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that does not divide by gradients which are zero but for rounding."""
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)


def expected(
    net: nn.Module, data: torch.Tensor, *, clip: float | None = None, made_by: Callable[..., Any] = adam
) -> dict[str, torch.Tensor]:
    """Return the weights that one process has after training on what all ranks read."""
    net = copy.deepcopy(net)
    optimizer = made_by(net)
    for batch in data:
        advance(net(batch.reshape(-1, WIDTH)).square().mean(), optimizer, model=net, clip=clip)
    return net.state_dict()


def accelerator(sharded: bool = False, **given: Any) -> Accelerator:
    """Return an Accelerator whose ranks share out experts in pairs."""
    rest = {"dp_shard_size" if sharded else "dp_replicate_size": ensure().size // 2}
    if sharded:
        given["fsdp_plugin"] = fsdp(**blocks("Mixture"))
    return Accelerator(parallelism_config=ParallelismConfig(ep_size=2, **rest), **given)


def trained(net: Any, run: Accelerator, data: torch.Tensor, *, clip: float | None = None) -> Any:
    """Train a net on this rank's part of the data."""
    net, optimizer = run.prepare(net, adam(net))
    for batch in data:
        loss = net(batch[run._runtime.strategy.layout.part]).square().mean()
        advance(loss, optimizer, run=run, model=net, clip=clip)
    return net


def assert_equal(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Compare a trained net with the weights of one process."""
    for name, value in net.state_dict().items():
        torch.testing.assert_close(whole(value).detach(), state[name], rtol=1e-6, atol=1e-6, msg=f"{name}: {{}}".format)


@world(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_experts_run_without_gradients_and_compiled(sharded: bool) -> None:
    """Each way gives what one process computes; a copy, whose passes would use these experts, is refused by name."""
    net, batch = made(), batches(2, 1)[0, ensure().rank]
    wanted = net(batch).detach()
    net = accelerator(sharded).prepare(net)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(net(batch), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.compile(net, backend="eager")(batch), wanted, rtol=1e-6, atol=1e-6)
    for make in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(EngineUnavailableError, match=r"cannot be copied; got a .*Net\. .* before prepare\(\)"):
            make(net)


@world(2)
@pytest.mark.parametrize("routing", ["as it comes", "all to two experts of one rank"])
@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_that_share_out_experts_train_as_one_process(routing: str, sharded: bool) -> None:
    """Weights after 5 steps are those of one process, and a rank holds half of the experts' bytes."""
    data = batches(2, 5)
    for kind in KINDS:
        reset_all()
        net = made(routing, kind=kind)
        state = expected(net, data, clip=0.5)
        net = trained(net, accelerator(sharded), data, clip=0.5)
        assert_equal(net, state)
        for block in net.blocks:
            parameters = list(block.experts.parameters())
            assert all(isinstance(each, DTensor) for each in parameters)
            held = sum(each.to_local().untyped_storage().nbytes() for each in parameters)
            assert held * 2 == sum(each.numel() * 4 for each in parameters)


@world(2)
def test_weights_of_losses_reach_the_experts_of_every_rank() -> None:
    """Sums of losses, each with its number of tokens as weight, have the gradients of their mean in one process."""
    data = batches(2, 1)[0]
    for kind in KINDS:
        reset_all()
        plain, run = made(kind=kind), accelerator()
        net = run.prepare(made(kind=kind))
        own = data[ensure().rank][: 2 + ensure().rank]
        plain(torch.cat([data[0, :2], data[1, :3]])).square().mean().backward()
        run.backward(net(own).square().sum(), weight=len(own))
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(whole(one.grad), other.grad)


@world(2)
def test_one_expert_on_each_rank_gives_what_one_process_does() -> None:
    """Two ranks with two experts compute what one process computes."""
    data = batches(2, 1)[0, ensure().rank]
    for kind in KINDS:
        reset_all()
        plain, net = made(kind=kind, count=2), accelerator().prepare(made(kind=kind, count=2))
        torch.testing.assert_close(net(data), plain(data))


@world(4)
@pytest.mark.parametrize("sharded", [False, True])
def test_copies_and_shards_with_experts_train_as_one_process(sharded: bool) -> None:
    """On four ranks two hold the same experts, and what they learn is averaged."""
    data = batches(4, 5)
    for kind in KINDS:
        reset_all()
        net = trained(made(kind=kind), accelerator(sharded), data, clip=0.5)
        assert_equal(net, expected(made(kind=kind), data, clip=0.5))


@world(4)
@pytest.mark.parametrize("sharded", [False, True])
def test_split_layers_with_experts_train_as_one_process(sharded: bool) -> None:
    """Pairs of ranks that share out experts, each with another pair that splits layers, or that shares a sequence."""
    data = torch.randn(3, 2, 1, 8, WIDTH, generator=torch.Generator().manual_seed(7))
    plan = TorchTensorParallelConfig(tp_plan={"blocks.*.router": "colwise_gather_output"})
    for kind, axes in itertools.product(KINDS, ({"tp_size": 2, "tp_handler": plan}, {"cp_size": 2})):
        reset_all()
        plugins = {"fsdp_plugin": fsdp(**blocks("Mixture"))} if sharded else {}
        run = Accelerator(parallelism_config=ParallelismConfig(ep_size=2, **axes), **plugins)  # type: ignore[arg-type]
        net: Any = made(kind=kind)
        state = expected(net, data.reshape(3, -1, WIDTH), clip=0.5, made_by=momentum)
        net, optimizer = run.prepare(net, momentum(net))
        for batch in data:
            rows = batch[run._runtime.strategy.layout.part].clone()
            with run.maybe_context_parallel(buffers=[rows], buffer_seq_dims=[1]):
                run.backward(net(rows.reshape(-1, WIDTH)).square().mean())
            run.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(net, state)


@world(2)
def test_gradients_add_up_from_the_weights_of_rank_0() -> None:
    """Windows of three batches train as one batch of all; ranks that start with other weights take the first one's."""
    data = batches(2, 6)
    net = made()
    state = expected(net, data.view(2, 6, TOKENS, WIDTH))
    if ensure().rank == 1:
        nn.init.zeros_(net.blocks[0].experts.up)
    run = accelerator(sharded=True, gradient_accumulation_steps=3)
    net, optimizer = run.prepare(net, adam(net))
    for batch in data:
        with run.accumulate(net):
            advance(net(batch[ensure().rank]).square().mean(), optimizer, run=run)
    assert_equal(net, state)


def _run(weights: torch.Tensor) -> Any:
    """Return what computes rows with the given matrices, one for each expert held here."""

    def compute(rows: torch.Tensor, held: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return torch.einsum("n,nw,nwv->nv", factors, rows, weights[held])

    return compute


@world(2)
@pytest.mark.parametrize("routing", ["as it comes", "all to expert 0", "none from one rank"])
def test_dispatch_computes_what_one_process_computes(routing: str) -> None:
    """Outputs and the gradients of tokens, weights and experts are those of all experts in one place."""
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(COUNT, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    tokens = torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    scores = torch.rand(2, TOKENS, COUNT, generator=generator, dtype=torch.float64)
    rank, group = ensure().rank, dist.group.WORLD
    if routing == "all to expert 0":
        scores[..., 0] += 9
    own = slice(None, 0 if routing == "none from one rank" and rank == 1 else None)
    whole_of = [tokens[0], tokens[1, :0]] if routing == "none from one rank" else list(tokens)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.pow(3).sum()

    one, reference = matrices.clone().requires_grad_(), torch.zeros_like(matrices)
    for part, score in zip(whole_of, scores, strict=True):
        weights, numbers = score[: len(part)].topk(2)
        made_of = _run(one)(part.repeat_interleave(2, 0), numbers.flatten(), weights.flatten())
        loss(made_of.view(len(part), 2, WIDTH).sum(1)).backward()
    reference = one.grad

    here = matrices[rank * 2 : rank * 2 + 2].clone().requires_grad_()
    inputs = tokens[rank][own].clone().requires_grad_()
    weights, numbers = scores[rank][own].topk(2)
    output = dispatch(inputs, numbers, weights, experts=COUNT, group=group, compute=_run(here))
    loss(output).backward()
    torch.testing.assert_close(here.grad, reference[rank * 2 : rank * 2 + 2])

    alone = tokens[rank][own].clone().requires_grad_()
    made_of = _run(matrices)(alone.repeat_interleave(2, 0), numbers.flatten(), weights.flatten())
    wanted = made_of.view(-1, 2, WIDTH).sum(1)
    torch.testing.assert_close(output, wanted)
    loss(wanted).backward()
    torch.testing.assert_close(inputs.grad, alone.grad)


@world(2)
def test_a_loss_of_all_rows_is_that_of_the_whole_batch() -> None:
    """A function of the rows of all ranks has one value everywhere, and its mean gradient is that of one process."""
    rank = ensure().rank
    rows = torch.arange(10.0).view(5, 2)
    one = rows.clone().requires_grad_()
    one.softmax(-1).mean(0).square().sum().backward()
    own = (rows[:2] if rank == 0 else rows[2:]).clone().requires_grad_()
    rows_of_all(own, [dist.group.WORLD]).softmax(-1).mean(0).square().sum().backward()
    torch.testing.assert_close(own.grad / 2, one.grad[:2] if rank == 0 else one.grad[2:])


class Waits(TorchFunctionMode):
    """Notes the calls for which the host would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        masked = func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) is torch.bool
        repeats = func.__name__ == "repeat_interleave" and "output_size" not in given
        if masked or repeats or func.__name__ in ("tolist", "item", "__int__", "__bool__", "bincount", "nonzero"):
            self.found.append(func.__name__)
        return func(*args, **given)


@world(2)
def test_routing_waits_for_a_device_once() -> None:
    """How many tokens go where is read in one copy, and so are the lengths of all ranks' rows."""
    rank, group = ensure().rank, dist.group.WORLD
    with Waits() as waits:
        route = routed(torch.tensor([[3, 0], [1 + rank, 3]]), 4, group)
    assert waits.found == ["tolist"]
    assert (route.order.tolist(), route.leaving) == (([1, 2, 0, 3], [2, 2]) if rank == 0 else ([1, 2, 0, 3], [1, 3]))
    assert (route.held.tolist(), route.coming) == (([0, 1, 0], [2, 1]) if rank == 0 else ([1, 1, 0, 1, 1], [2, 3]))
    with Waits() as waits:
        assert len(rows_of_all(torch.ones(1 + rank, 2), [group])) == 3
    assert waits.found == ["tolist"]


@world(2)
def test_an_unknown_expert_is_refused_on_all_ranks() -> None:
    """One rank's strange number ends the pass on both, and says which rank has it."""
    numbers = torch.tensor([[0, COUNT if ensure().rank == 1 else 1]])
    with pytest.raises(StateError, match=r"from 0 to 3; got 1 other numbers on the ranks \[1\]"):
        dispatch(
            torch.ones(1, WIDTH),
            numbers,
            torch.ones(1, 2),
            experts=COUNT,
            group=dist.group.WORLD,
            compute=_run(torch.ones(2, WIDTH, WIDTH)),
        )


def _dense(net: Any) -> None:
    net.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


def _adapted(net: Any) -> None:
    adapter = nn.Module()
    adapter.base_layer = net.blocks[0].experts
    net.blocks[0].experts = adapter


def _plain_list(net: Any) -> None:
    for block in net.blocks:
        block.experts = nn.ModuleList(block.experts)


PACKED = nn.Parameter(torch.ones(COUNT, 2, 2, dtype=torch.int8), requires_grad=False)
REFUSED: list[tuple[dict[str, Any], Callable[[Any], object], str]] = [
    ({"count": 3}, lambda net: net, r"num_experts=3 of blocks\.0\.experts and ep"),
    ({}, _dense, r"ep_size=2 and Net, in which none were found"),
    ({}, _adapted, r"got blocks\.0\.experts, an adapter on the experts .* list of modules"),
    (
        {},
        lambda net: net.blocks[0].experts.register_buffer("seen", torch.zeros(COUNT)),
        r"got blocks\.0\.experts\.seen, which has a row for each expert",
    ),
    (
        {},
        lambda net: setattr(net.blocks[1].experts, "up", net.blocks[0].experts.up),
        r"got up of blocks\.\d\.experts, which others share",
    ),
    (
        {},
        lambda net: setattr(net.blocks[0].experts, "up", PACKED),
        r"blocks\.0\.experts\.up, which is packed as torch\.int8",
    ),
    (
        {},
        lambda net: net.blocks[0].experts.up.register_hook(lambda gradient: gradient),
        r"hooks of blocks\.0\.experts\.up",
    ),
    (
        {"kind": Listed},
        lambda net: net.blocks[0].experts[2][0].register_parameter("bias", None),
        r"got blocks\.0\.experts\.2, which differs .* in 0\.bias",
    ),
    (
        {"kind": Listed},
        lambda net: net.blocks[0].experts[1][1].register_buffer("seen", torch.zeros(1)),
        r"got blocks\.0\.experts\.1\.1\.seen",
    ),
    ({"kind": Listed}, _plain_list, r"which none were found.* Give a plain ModuleList such a forward"),
]


@world(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_experts_that_cannot_be_shared_are_refused_unchanged(sharded: bool) -> None:
    """Each refusal names what was found; the model has the parameters that it had."""
    run = accelerator(sharded)
    for given, change, message in REFUSED:
        change(net := made(**given))
        with refused(PreparationError, message, run, net):
            run.prepare(net)
        assert all("forward" not in vars(module) for module in net.modules())


def _laid_out(layout: str, kind: type[Experts | Listed]) -> Accelerator:
    """Return an Accelerator of a layout as commands write it."""
    spec = parse_layout(layout)
    plugins: dict[str, Any] = {"fsdp_plugin": fsdp(**blocks("Mixture"))} if spec.engine == "fsdp" else {}
    if spec.engine == "ddp" and kind is Listed:
        plugins["kwargs_handlers"] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    sizes: Any = {f"{axis}_size": size for axis, size in spec.sizes}
    return Accelerator(parallelism_config=ParallelismConfig(**sizes), **plugins)


def _goes_on(layouts: tuple[str, ...], folder: Path, kind: type[Experts | Listed] = Experts) -> None:
    """Train a step under each layout, save, and load bit for bit under the next."""
    ranks = parse_layout(layouts[0]).ranks
    data = batches(ranks, len(layouts))
    states: list[dict[str, torch.Tensor]] = []
    for turn, layout in enumerate(layouts):
        reset_all()
        run = _laid_out(layout, kind)
        net = made(kind=kind)
        net, optimizer = run.prepare(net, adam(net))
        if turn:
            run.load_state(str(folder / f"{turn - 1}"))
            now = {name: whole(value).clone() for name, value in run.unwrap_model(net).state_dict().items()}
            assert all(torch.equal(now[name], value) for name, value in states[-1].items())
        advance(net(data[turn, dist.get_rank()]).square().mean(), optimizer, run=run)
        run.save_state(str(folder / f"{turn}"))
        states.append({name: whole(value).clone() for name, value in run.unwrap_model(net).state_dict().items()})
    for name, value in expected(made(kind=kind), data).items():
        torch.testing.assert_close(states[-1][name], value, rtol=1e-6, atol=1e-6)
    run.save_model(net, str(folder / "whole"))
    run.wait_for_everyone()
    merge_weights(folder / f"{turn}" / "pytorch_model_fsdp_0", folder / "merged" / str(dist.get_rank()))
    for path in (folder / "whole", folder / "merged" / str(dist.get_rank())):
        saved = load_file(path / "model.safetensors")
        assert saved.keys() == states[-1].keys()
        assert all(torch.equal(saved[name], value) for name, value in states[-1].items())


@world(2)
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(("ep2", "dp2", "ep2"), marks=pytest.mark.full("another case of a grid")),
        # under FSDP2 alone, ranks use different experts of a list
        pytest.param(("ep2xfsdp1", "ep2", "fsdp2", "ep2xfsdp1"), marks=requires("torch:2.13")),
    ],
)
def test_a_run_goes_on_with_experts_shared_out_or_not(layouts: tuple[str, ...], tmp_path: Path) -> None:
    """Weights and optimizer states load under the next layout; saved whole, and merged, they have the model's names."""
    for kind in KINDS:
        _goes_on(layouts, tmp_path / kind.__name__, kind)


def _bytes_read() -> int:
    """Return how many bytes this process has read from files so far, by the count of the kernel."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@world(2)
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts the bytes that a process reads")
def test_a_rank_reads_half_of_the_experts(tmp_path: Path) -> None:
    """Of experts a rank reads what it holds; besides, each file's sum is checked by one of a machine's ranks."""
    for kind in KINDS:
        reset_all()
        net, run, folder = made(kind=kind), accelerator(), tmp_path / kind.__name__
        for experts in (block.experts for block in net.blocks):  # so large that other contents of files do not count
            if isinstance(experts, Experts):
                experts.up = nn.Parameter(torch.randn(COUNT, 1024, 256))
            else:
                for expert in experts:
                    expert[0] = nn.Linear(1024, 256)
        size = sum(each.nbytes for block in net.blocks for each in block.experts.parameters())
        net = run.prepare(net)
        held = [whole(each).detach().clone() for each in net.parameters()]
        run.save_state(folder)
        for parameter in net.parameters():
            parameter.data.zero_()
        checked = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2
        before = _bytes_read()
        run.load_state(folder)
        read = (_bytes_read() - before - checked) / size
        assert all(torch.equal(whole(each), value) for each, value in zip(net.parameters(), held, strict=True))
        assert 0.5 < read < 0.55, read


@world(4)
def test_experts_continue_on_four_ranks_on_two_and_on_one(tmp_path: Path) -> None:
    """The same where a rank holds one expert, two, and all of them."""
    _goes_on(("ep4", "fsdp2xep2", "dp4", "dp2xep2", "ep4"), tmp_path / "stacked")
    _goes_on(("ep4", "fsdp2xep2", "ep4"), tmp_path / "listed", Listed)
