"""What a replica refuses, by name and before anything is trained."""

import copy
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.devices.cpu import CpuDevice
from accel_core.errors import CheckpointMismatchError, ConfigurationError, PreparationError, StateError
from accel_core.host.environ import text
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.process.store import loopback_store
from accel_core.process.world import lead
from accel_core.tracking.hub import TrackerHub
from accel_core.tracking.tracker import GeneralTracker
from accel_testing import limits
from accel_torchft.kwargs import FaultToleranceKwargs
from accel_torchft.notes import Notes
from accel_torchft.trackers import ReplicatedHub

pytest.importorskip("torchft", reason="torchft is not installed")


class Stream(IterableDataset[int]):
    """Numbers without an end that is known."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch, fresh_state: None) -> Iterator[None]:
    """Let this process be the first of two replicas."""
    store = loopback_store(0, timedelta(seconds=limits.limit()))
    variables = {"": "0", "_COUNT": "2", "_LIFE": "0", "_STORE": f"127.0.0.1:{store.port}"}
    for name, value in variables.items():
        monkeypatch.setenv(f"ACCEL_REPLICA{name}", value)
    yield
    lead(True)


@pytest.fixture
def made(replica: None) -> Callable[..., Accelerator]:
    """Return what makes an Accelerator with a handler for replicas, of which this process is one."""
    return partial(Accelerator, cpu=True, kwargs_handlers=[FaultToleranceKwargs()])


def loader_of(samples: int = 8) -> DataLoader[Any]:
    """Return a loader of numbers."""
    return DataLoader(TensorDataset(torch.arange(samples).float()[:, None]), batch_size=2)


@pytest.mark.usefixtures("fresh_state")
def test_without_the_launcher_the_handler_does_nothing() -> None:
    """A script with FaultToleranceKwargs trains alone as ever."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[FaultToleranceKwargs()])
    assert accelerator.replicas is None
    model, loader = accelerator.prepare(nn.Linear(1, 1), loader_of())
    for (batch,) in loader:
        accelerator.backward(model(batch).sum())


def test_settings_with_which_replicas_would_part_are_refused(made: Any) -> None:
    """Each is named before a process of torchft is there."""
    with pytest.raises(ConfigurationError, match="step_scheduler_with_optimizer=False"):
        made(step_scheduler_with_optimizer=False)
    made()
    with pytest.raises(ConfigurationError, match="One Accelerator"):
        made()


def test_loaders_that_cannot_be_divided_anew_are_refused(made: Any) -> None:
    """Streams, batches without a size, and the readers of others: nothing of them stays prepared."""
    accelerator = made()
    sizes = [[0, 1, 2], [3], [4, 5, 6, 7]]
    for wrong in (
        DataLoader(Stream(), batch_size=2),
        DataLoader(TensorDataset(torch.arange(8)), batch_sampler=sizes),
    ):
        with pytest.raises(PreparationError, match="that cannot be"):
            accelerator.prepare(wrong)
    accelerator.dataloader_config = DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(PreparationError, match="without dispatch_batches"):
        accelerator.prepare(loader_of())
    assert accelerator._dataloaders == []


def test_evaluation_reads_all_data_on_each_replica(made: Any) -> None:
    """Under no_grad, and where models are set to evaluate, a loader gives everything, the short batch too."""
    accelerator = made()
    model, loader = accelerator.prepare(nn.Linear(1, 1), loader_of(7))
    with torch.no_grad():
        assert [len(batch) for (batch,) in loader] == [2, 2, 2, 1]
    model.eval()
    assert torch.cat([batch for (batch,) in loader]).flatten().tolist() == [*range(7)]


def test_steps_that_replicas_cannot_make_are_refused(made: Any) -> None:
    """A backward pass of no prepared loader, and an optimizer that asks for several losses."""
    accelerator = made()
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="outside of one that is read"):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(ConfigurationError, match="a closure"):
        optimizer.step(lambda: 0.0)
    skipped = accelerator.skip_first_batches(accelerator.prepare(loader_of()), 1)
    with pytest.raises(StateError, match="skip_first_batches"):
        next(iter(skipped))


def test_optimizers_that_update_inside_of_backward_are_refused(made: Any) -> None:
    """They would learn from the gradients of one replica alone."""
    library = pytest.importorskip("lomo_optim", reason="needs the library lomo_optim, not installed here")
    accelerator, model = made(), nn.Linear(1, 1)
    model, _, loader = accelerator.prepare(model, library.Lomo(model, lr=0.1), loader_of())
    with pytest.raises(PreparationError, match="got a LOMO optimizer"):
        next(iter(loader))


class Steps(GeneralTracker):
    """Keeps the steps that it was given."""

    name, requires_logging_directory, tracker = "steps", False, None
    fills_step = True

    def __init__(self, run: int) -> None:
        super().__init__()
        self.run, self.steps = run, list[tuple[Any, int | None]]()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Keep a step."""
        self.steps.append((*values, step))

    def state_dict(self) -> dict[str, int]:
        """Return the run."""
        return {"run": self.run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a run."""
        self.run = state["run"]


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.usefixtures("replica")
def test_trackers_follow_the_replica_that_speaks_for_the_run(guarded: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Steps go on where the first one stopped, in its run, whether a script logs everywhere or on the main process."""
    notes = Notes(text("ACCEL_REPLICA_STORE") or "")
    trackers = [Steps(number) for number in range(2)]
    first, second = (ReplicatedHub(TrackerHub([each]), notes, each.run == 0, 10) for each in trackers)
    for hub in (first, second):
        hub.init("counting")
    for name in "ab":
        for hub in (first,) if guarded else (first, second):
            hub.log({name: 1})
    second.follow(True)
    second.log({"c": 1})
    first.follow(False)
    for hub in (second,) if guarded else (first, second):
        hub.log({"d": 1})
    for hub in (first, second):
        hub.finish()
        hub.follow(True)
    assert [each.steps for each in trackers] == [[("a", 0), ("b", 1)], [("c", 2), ("d", 3)]]
    assert [each.run for each in trackers] == [0, 0]
    assert not caplog.text
    ReplicatedHub(TrackerHub(), notes, False, 10).follow(True)
    assert "nothing is tracked any more. Call it outside of any `if`" in caplog.text


def test_weights_on_the_cpu_are_refused_beside_gpus(made: Any) -> None:
    """NCCL, which averages over replicas on GPUs, would lose every step of them."""
    runtime = made()._runtime
    runtime.keep_model(nn.Linear(1, 1))
    runtime.world = replace(runtime.world, device=torch.device("cuda", 0))
    with pytest.raises(PreparationError, match="got weights of Linear there"):
        runtime.keep_model(nn.Linear(1, 1))


class _Manager:
    """What a step tells of its errors, as torchft's manager keeps it."""

    error: Any = None

    def errored(self) -> Any:
        """Return the error."""
        return self.error

    def report_error(self, error: Exception) -> None:
        """Keep the error."""
        self.error = error


def test_an_exchange_that_was_given_up_is_not_read(made: Any) -> None:
    """NCCL's wait returns before an exchange is done, and one that was given up leaves what was in memory before."""
    from torchft.process_group import ProcessGroupGloo
    from torchft.work import _DummyWork

    class GivenUp(ProcessGroupGloo):
        def errored(self) -> Exception:
            return RuntimeError("aborted")

    replicas, table = made().replicas, torch.zeros(2, 5, dtype=torch.int64)
    replicas._manager, replicas._group, replicas.place = _Manager(), GivenUp(timedelta(seconds=limits.limit())), (1, 2)
    replicas._table = table, _DummyWork(table)
    assert replicas._heard() is None
    assert replicas._told == []
    assert str(replicas._manager.error) == "aborted"
    replicas._manager = None


def address_of(lighthouse: Any) -> str:
    """Return where it can be reached, whatever this machine is called."""
    return f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, made: Any) -> Iterator[Accelerator]:
    """Return an Accelerator whose replica meets others through torchft's own servers, and is alone."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address_of(lighthouse))
    monkeypatch.setenv("ACCEL_REPLICA_LIFE", "1")  # which does not wait for the other one to start
    accelerator = made()
    yield accelerator
    accelerator.replicas.leave()
    accelerator.replicas._asker.shutdown()
    lighthouse.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # torchft calls it
def test_a_step_that_nobody_decides_in_time_is_made_again(
    connected: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that was stopped while torchft decides gets no answer: it connects anew, and loses no sample."""
    from torchft.coordination import LighthouseServer, ManagerClient, ManagerServer

    limit, short = timedelta(seconds=limits.limit()), timedelta(seconds=0.1)
    other = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    server = ManagerServer("waits", address_of(other), "127.0.0.1", "[::]:0", "", 2, limit, limit, 0)
    client = ManagerClient(server.address(), limit)  # of one process of two
    replicas, model, seen = connected.replicas, nn.Linear(1, 1), list[float]()
    alone = copy.deepcopy(model)
    model, optimizer, loader = connected.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of())
    for (batch,) in loader:
        if len(seen) == 2 and not replicas.lost_steps:
            unanswered = partial(client.should_commit, 0, 0, True, short)
            monkeypatch.setattr(replicas._manager, "should_commit", unanswered)
        connected.backward(model(batch).sum())
        optimizer.step()
        seen += [] if optimizer.step_was_skipped else batch[:, 0].tolist()
        optimizer.zero_grad()
    server.shutdown()
    other.shutdown()
    assert seen == torch.arange(8.0).tolist()
    assert replicas.lost_steps == 1
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for (batch,) in loader_of():
        alone(batch).sum().backward()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(connected.unwrap_model(model).state_dict(), alone.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # torchft calls it
def test_a_replica_whose_objects_differ_ends(connected: Accelerator) -> None:
    """Where the state of the others does not fit, it would ask for it again in each step, and no step would be made."""
    connected.prepare(nn.Linear(1, 1))
    replicas = connected.replicas
    replicas._held = replicas._capture()
    replicas._held["run"]["models"].clear()
    with pytest.raises(CheckpointMismatchError, match="has the same models; got 0 there, and 1 here"):
        replicas.meet()


def test_an_error_of_nccl_does_not_end_the_process(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group over replicas is made where torch leaves errors to torchft; torch's launcher asks for the opposite."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    found = []

    def group(_: timedelta) -> None:
        found.append(text("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
        raise ConnectionError

    monkeypatch.setattr("torchft.ProcessGroupNCCL", group)
    replicas = made().replicas
    replicas._world = replace(replicas._world, device=torch.device("cuda", 0))
    with pytest.raises(ConnectionError):
        replicas._connect(1.0)
    assert found == ["0"]


def test_a_state_is_taken_behind_what_writes_it(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of torchft take it and copy it to the CPU, which wait for no other stream of a GPU."""
    replicas, seen = made().replicas, list[str]()
    monkeypatch.setattr(CpuDevice, "synchronize", lambda _: seen.append("waited"))
    replicas._capture = lambda: seen.append("taken")
    replicas._rests.set()
    replicas._at_rest()
    assert seen == ["waited", "taken", "waited"]


@pytest.fixture
def transports() -> Iterator[Callable[..., Any]]:
    """Return what makes a transport with a timeout in seconds, for this machine or the ones named; all are left."""
    from accel_torchft.transport import Transport

    made = []

    def make(seconds: float, *machines: str) -> Any:
        made.append(Transport(timedelta(seconds=seconds), machines or ["127.0.0.1"]))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()
        transport._server.server_close()


@pytest.mark.parametrize(
    ("client", "answered"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.2", True),
        ("2001:db8::2", True),
        ("2001:db8::3", False),
    ],
)
def test_states_are_sent_to_machines_of_the_run_alone(transports: Any, client: str, answered: bool) -> None:
    """They are pickles, which nobody else may ask for; torchft's server listens on every address."""
    transport = transports(5, "2001:db8::1", "2001:db8::2", "192.0.2.2")
    assert transport.address().startswith("http://[2001:db8::1]:")
    assert transport._server.verify_request(None, (client, 1)) is answered


def test_a_transport_that_is_left_keeps_neither_thread_nor_state(transports: Any) -> None:
    """A replica makes a new one whenever it comes back; on a GPU each has a copy of the state, which it sent."""
    # A socket keeps nanoseconds and returns 1.068 s as another float; torchft answered such a request with 500.
    transport, state = transports(1.068), {"weight": torch.ones(2)}
    held = weakref.ref(state["weight"])
    transport.send_checkpoint([1], 3, state, timedelta(seconds=1))
    found = transport.recv_checkpoint(0, transport.address(), 3, timedelta(seconds=limits.limit()))
    assert found["weight"].tolist() == [1, 1]
    transport.shutdown(wait=False)
    del state
    assert held() is None
    assert limits.wait_until(lambda: not transport._thread.is_alive())


def test_a_slow_reader_of_a_state_is_cut_off(transports: Any) -> None:
    """It would hold up the next step for as long as it reads; torchft gives up after the timeout, by an error."""
    transport = transports(0.2)
    state = {str(number): torch.full((1 << 14,), float(number)) for number in range(1 << 10)}  # 64 MiB
    read = 0

    def trickle() -> None:
        nonlocal read
        while chunk := reader.recv(1 << 16):
            read += len(chunk)
            begun.set()
            over.wait(0.005)

    begun, over = threading.Event(), threading.Event()
    port = transport._server.socket.getsockname()[1]
    transport.send_checkpoint([1], 3, state, timedelta(seconds=1))
    with socket.create_connection(("127.0.0.1", port)) as reader:
        reader.sendall(b"GET /checkpoint/3/full HTTP/1.0\r\n\r\n")
        thread = threading.Thread(target=trickle)
        thread.start()
        assert begun.wait(limits.limit())
        transport.disallow_checkpoint()
        over.set()
        thread.join(limits.limit())
    assert read < 64 << 20
    transport.send_checkpoint([1], 4, {"next": torch.ones(2)}, timedelta(seconds=1))
    address, limit = f"http://127.0.0.1:{port}/checkpoint/", timedelta(seconds=limits.limit())
    found = transport.recv_checkpoint(0, address, 4, limit)
    assert found["next"].tolist() == [1, 1]
