"""What an Accelerator does beside training, in one process on a GPU: where it computes, collectives, compiling."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.comm import collectives, objects
from accel_core.comm.padding import pad_across_processes
from accel_core.errors import DeviceUnavailableError
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.process import world
from accel_core.random import set_seed

DEVICE = torch.device("cuda", 0)
BACKEND = "inductor" if DEVICE.type != "cpu" else "aot_eager"
DTYPES = (torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]


@pytest.fixture
def left() -> Iterator[None]:
    """Leave the process group that a test joined."""
    yield
    world.destroy()


@pytest.mark.parametrize(
    ("named", "use_cpu", "cpu", "expected"),
    [
        (None, None, False, DEVICE),
        (DEVICE.type, None, False, DEVICE),
        (str(DEVICE), None, False, DEVICE),
        (str(DEVICE), None, True, torch.device("cpu")),
        ("cpu", None, False, torch.device("cpu")),
        (None, None, True, torch.device("cpu")),
        (None, "true", False, torch.device("cpu")),
    ],
)
def test_a_process_computes_where_it_was_told(
    named: str | None, use_cpu: str | None, cpu: bool, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variables and by `cpu=True`, which wins; what is prepared comes there, under a device with its number."""
    for name, value in (("ACCELERATE_TORCH_DEVICE", named), ("ACCELERATE_USE_CPU", use_cpu)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    accelerator = Accelerator(cpu=cpu)
    assert accelerator.device == accelerator.state.device == expected
    assert accelerator.prepare(nn.Linear(2, 2)).weight.device == expected


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number beyond those that the process sees is not taken for another one."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", f"{DEVICE.type}:99")
    with pytest.raises(DeviceUnavailableError, match=f"{DEVICE.type}:99"):
        Accelerator()


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("backend", [None, "own", "gloo"])
def test_collectives_of_one_process(backend: str | None) -> None:
    """Without a group, in one of NCCL and in one of gloo, a nest comes back as it is, on its device."""
    if backend is not None:
        init = {} if backend == "own" else {"backend": backend}
        here = world.ensure(needs=world.GroupNeeds(alone=True), **init)
        assert here.backend == (backend if backend != "own" else {"cuda": "nccl"}.get(DEVICE.type, "gloo"))
    nest = {str(dtype): [torch.arange(6).view(2, 3).to(dtype).to(DEVICE)] for dtype in DTYPES}
    wanted = copy.deepcopy(nest)
    for result in (
        collectives.gather(nest),
        collectives.reduce(nest, "sum"),
        collectives.broadcast(nest),
        pad_across_processes(nest),
        Accelerator().gather_for_metrics(nest),
    ):
        for name, (tensor,) in wanted.items():
            assert result[name][0].device == DEVICE
            assert result[name][0].dtype == tensor.dtype
            assert result[name][0].view(torch.uint8).equal(tensor.view(torch.uint8))
    assert objects.gather_object([{"a": 1}]) == [{"a": 1}]
    (given,) = objects.broadcast_object_list([torch.ones(2, device=DEVICE)])
    assert given.device == DEVICE
    with Accelerator().split_between_processes(torch.arange(4, device=DEVICE)) as part:
        assert part.tolist() == [0, 1, 2, 3]
        assert part.device == DEVICE


@pytest.mark.usefixtures("left")
def test_triggers_and_barriers_in_a_group() -> None:
    """What ranks agree on works in a group of one: a flag, a barrier, and the end of training."""
    world.ensure(needs=world.GroupNeeds(alone=True))
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    accelerator.end_training()
    assert not torch.distributed.is_initialized()


def test_a_seed_repeats_the_device() -> None:
    """The generators of the CPU and of the device repeat, apart from each other."""
    Accelerator()
    drawn = []
    for _ in range(2):
        set_seed(3, device_specific=True)
        drawn.append((torch.rand(4), torch.rand(4, device=DEVICE)))
    assert all(map(torch.equal, *drawn))
    assert not torch.equal(drawn[0][0], drawn[1][1].cpu()) or DEVICE.type == "cpu"


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_is_of_the_device(precision: str, dtype: torch.dtype) -> None:
    """Products in `accelerator.autocast()` have 16 bits, and those of the same run outside of it 32."""
    accelerator = Accelerator(mixed_precision=precision)
    side = torch.randn(8, 8, device=DEVICE)
    with accelerator.autocast():
        assert (side @ side).dtype == dtype
    assert (side @ side).dtype == torch.float32


class Blocks(nn.Module):
    """Equal blocks, which can be compiled as one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return four numbers a row."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # torch's advice, of compiled float32 products
@pytest.mark.parametrize(("regional", "precision"), [(False, "no"), (False, "fp16"), (True, "bf16")])
def test_a_compiled_model_trains_as_one_that_is_not(regional: bool, precision: str) -> None:
    """Whole or block by block, in each precision, losses of four steps are close to those of the same run in eager."""
    losses: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for compiled in (False, True):
        plugin = TorchDynamoPlugin(backend=BACKEND, use_regional_compilation=regional) if compiled else None
        accelerator: Any = Accelerator(mixed_precision=precision, dynamo_plugin=plugin)
        plain = Blocks()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        for _ in range(4):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[compiled].append(loss.detach())
    tolerance = 1e-4 if precision == "no" else 2e-2
    torch.testing.assert_close(losses[True], losses[False], rtol=tolerance, atol=tolerance)
    assert losses[True][-1] < losses[True][0]
