"""Training on a mesh of gloo ranks, beside hand-written parallelize_module and context_parallel of torch.

    python benchmarks/mesh.py [--only ROW]

Steps (forward, backward, optimizer) of one run and of torch's own calls take turns; shown is the median of paired
ratios. Tensor parallel: two ranks split equal blocks with norms between them, by one plan; neither side clips, because
torch's own function cannot mix what is split with what is whole. Context parallel: two ranks share sequences of a model
of attention under a causal mask, by torch's `context_parallel` and DistributedDataParallel, and by
`maybe_context_parallel`, once gathered and once in a ring; torch knows no kernel of a CPU there and is given it. Clip:
four ranks take the norm of the gradients of a model that lies on two meshes (split and sharded, and sharded alone), and
torch's function takes it of the same model sharded on one. Layout: the time to lay out 1,024 ranks and to say with whom
one of them shares what. Accelerate 1.15.0 is no column: on a CPU it has no mesh.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from side_by_side import on_ranks, paired_seconds, report

ROUNDS, STEPS, WIDTH, LAYERS, BATCH = 60, 2, 256, 6, 64
LENGTH, HEADS, SEQUENCES = 512, 8, 2


def blocks():
    """Return equal blocks behind one another, each with a norm that stays whole."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.down(self.up(self.norm(x)).relu())

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(LAYERS)), torch.nn.Linear(WIDTH, 10))


def plan():
    """Return the plan of tensor parallel for these blocks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {f"{place}.{name}": style for place in range(LAYERS) for name, style in styles.items()}


def attentive():
    """Return a model of attention under a causal mask."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(seen.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer() for _ in range(LAYERS // 2)), torch.nn.Linear(WIDTH, 10))


def paired(plain, ours, rounds=ROUNDS):
    """Return the median of the ratios of the time of one step by hand and of ours, and both medians in seconds."""
    times = paired_seconds(plain, ours, rounds, STEPS)
    rows = [(by_hand / own, by_hand / STEPS, own / STEPS) for by_hand, own in times]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def products():
    """Compare steps of tensor parallel."""
    import torch
    from torch.distributed.tensor.parallel import parallelize_module

    from accel_core.accelerator import Accelerator
    from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig

    axes = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(tp_plan=plan()))
    accelerator, net = Accelerator(cpu=True, parallelism_config=axes), blocks()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    hand = parallelize_module(blocks(), accelerator.torch_device_mesh["tp"], plan())
    hand_optimizer = torch.optim.AdamW(hand.parameters(), lr=1e-3)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))

    def plain():
        torch.nn.functional.cross_entropy(hand(x), y).backward()
        hand_optimizer.step()
        hand_optimizer.zero_grad()

    def ours():
        with accelerator.accumulate(net):
            accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return paired(plain, ours, 3 * ROUNDS)  # collectives between all products make single rounds unsteady


def teach_the_kernel_of_cpus():
    """Let torch's `context_parallel` send the kernel of CPUs round its ring, as it does those of accelerators."""
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def attend(query, key, value, is_causal=False, dropout_p=0.0, scale=None):
        return forward(query, key, value, dropout_p, is_causal, scale=scale)

    def attend_backward(*, is_causal, dropout_p, scale, **given):
        tensors = (given[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp"))
        return backward(*tensors, dropout_p, is_causal, scale=scale)

    def handle(call, args, kwargs):
        local = [arg.to_local() if isinstance(arg, DTensor) else arg for arg in args]
        mesh, scale = args[0].device_mesh, kwargs.get("scale")
        given = {"is_causal": local[-1], "dropout_p": local[-2], "scale": scale}
        if call is forward:
            names = ("query", "key", "value")
            given = dict(zip(names, local, strict=False)) | {"is_causal": (*local, 0.0, False)[4], "scale": scale}
            found = ring._templated_ring_attention(mesh.get_group(), 2, attend, **given)
        else:
            names = ("grad_out", "query", "key", "value", "out", "logsumexp")
            given |= dict(zip(names, local, strict=False)) | {"grad_out_name": "grad_out"}
            found = ring._templated_ring_attention_backward(mesh.get_group(), 2, attend_backward, **given)
        return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in found)

    ring.custom_ops.update({forward: handle, backward: handle})


def sequences(how):
    """Compare steps of context parallel."""
    import torch
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    from accel_core.accelerator import Accelerator
    from accel_core.plugins.parallelism import ParallelismConfig, TorchContextParallelConfig

    axes = ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig(how))
    accelerator, net = Accelerator(cpu=True, parallelism_config=axes), attentive()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    teach_the_kernel_of_cpus()
    set_rotate_method(how)
    hand = torch.nn.parallel.DistributedDataParallel(attentive())
    hand_optimizer = torch.optim.AdamW(hand.parameters(), lr=1e-3)
    mesh = accelerator.torch_device_mesh["cp"]
    torch.manual_seed(0)
    data = torch.randn(SEQUENCES, LENGTH, WIDTH), torch.randint(10, (SEQUENCES, LENGTH))
    losses = []

    def loss_of(model, x, y):
        return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def plain():
        x, y = (each.clone() for each in data)
        with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1], no_restore_buffers={x, y}):
            loss = loss_of(hand, x, y)
            loss.backward()
        hand_optimizer.step()
        hand_optimizer.zero_grad()
        losses.append(loss.detach())

    def ours():
        x, y = (each.clone() for each in data)
        with accelerator.accumulate(net), accelerator.maybe_context_parallel([x, y], [1, 1], {x, y}):
            loss = loss_of(net, x, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())

    plain(), ours()
    torch.testing.assert_close(*losses)
    return paired(plain, ours)


def clip():
    """Compare the time to clip gradients of a model on two meshes with torch's on one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from accel_core.accelerator import Accelerator
    from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
    from accel_parallel.plugin import FullyShardedDataParallelPlugin

    handler = TorchTensorParallelConfig(tp_plan=plan())
    axes = ParallelismConfig(dp_shard_size=2, tp_size=2, tp_handler=handler)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=WIDTH**2)
    accelerator = Accelerator(cpu=True, parallelism_config=axes, fsdp_plugin=plugin)
    net = accelerator.prepare(blocks())
    hand, mesh = blocks(), init_device_mesh("cpu", (4,))
    for block in hand:
        fully_shard(block, mesh=mesh)
    fully_shard(hand, mesh=mesh)
    x = torch.randn(BATCH, WIDTH)
    hand(x).square().mean().backward()
    accelerator.backward(net(x).square().mean())
    meshes = {parameter.device_mesh.ndim for parameter in net.parameters()}
    assert meshes == {1, 2}, "the model lies on two meshes"

    def plain():
        torch.nn.utils.clip_grad_norm_(hand.parameters(), 1e6)

    def ours():
        accelerator.clip_grad_norm_(net.parameters(), 1e6)

    return paired(plain, ours)


def layout():
    """Return the milliseconds that it takes to lay out 1,024 ranks, and to ask for all that a rank has to know."""
    from accel_core.mesh.layout import GROUPS, MESH_AXES, Layout

    def once():
        begun = time.perf_counter()
        found = Layout.of(517, 1024, {"dp_replicate": 4, "dp_shard": 32, "cp": 2, "tp": 4})
        for axes in (*((axis,) for axis in MESH_AXES), *GROUPS.values()):
            found.group(*axes)
        assert len(found.parts) == 1024
        assert len(found.readers) == found.replicas == 128
        return time.perf_counter() - begun

    return [statistics.median(once() for _ in range(20)) * 1e3]


WORK = {function.__name__: function for function in (products, sequences, clip, layout)}


def row_of_steps(title, size, name, *arguments, reach):
    """Return the row of a measurement in steps."""
    ratio, plain, ours = on_ranks(__file__, size, name, *arguments)[0]
    return f"| {title} | {ratio:.3f} | {ours * 1e3:.2f} | {plain * 1e3:.2f} | {reach} |"


def row_of_clip():
    """Return the row of the time to clip."""
    ratio, plain, ours = on_ranks(__file__, 4, "clip")[0]
    title = "clip on two meshes ÷ torch's on one, time"
    return f"| {title} | {1 / ratio:.3f} | {ours * 1e3:.2f} | {plain * 1e3:.2f} | ≤ 1.15 |"


def row_of_layout():
    """Return the row of the time to lay out ranks."""
    return f"| layout of 1,024 ranks, ms | {on_ranks(__file__, 1, 'layout')[0][0]:.1f} | | | ≤ 20 |"


ROWS = {
    "products": lambda: row_of_steps("tensor parallel ÷ by hand, steps/s", 2, "products", reach="≥ 0.98"),
    "gathered": lambda: row_of_steps(
        "context parallel ÷ by hand, gathered, steps/s", 2, "sequences", "allgather", reach="≥ 0.97"
    ),
    "ring": lambda: row_of_steps(
        "context parallel ÷ by hand, in a ring, steps/s", 2, "sequences", "alltoall", reach="≥ 0.97"
    ),
    "clip": row_of_clip,
    "layout": row_of_layout,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: the peer has no mesh on a CPU")
    parser.add_argument("--only", choices=ROWS, help="measure one row")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, *arguments = json.loads(args.work)
        report(WORK[name], *arguments)
        return
    print("| gloo ranks | ratio | accel, ms | by hand, ms | target |\n|---|---|---|---|---|")
    for name in [args.only] if args.only else ROWS:
        print(ROWS[name](), flush=True)


if __name__ == "__main__":
    main()
