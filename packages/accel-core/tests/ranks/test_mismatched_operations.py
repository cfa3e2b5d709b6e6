"""Ranks that are in different operations, and threads that are in two at once, are told so in normal mode too."""

import atexit
import os
import signal
import threading
import time

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.comm import collectives, objects, transport
from accel_core.errors import CollectiveError, RankDisagreementError, RemoteRankError, UnsupportedTypeError
from accel_core.process import world as process_world
from accel_core.process.world import ensure
from accel_core.state.process import PartialState, wait_for_everyone
from accel_testing import limits, world

HERE = r"test_mismatched_operations\.py:\d+ in "


ODD_ONES = {
    "barrier": (lambda accelerator: accelerator.wait_for_everyone(), "wait_for_everyone"),
    "prepare": (lambda accelerator: accelerator.prepare(torch.nn.Linear(2, 2)), "prepare: DistributedDataParallel"),
    "objects": (lambda accelerator: objects.gather_object([1]), "gather_object"),
}


@pytest.mark.parametrize("odd", ODD_ONES)
@world(2)
def test_one_rank_elsewhere_while_the_other_gathers(odd):
    """Both ranks raise at once, and both errors name the operation and the line of each."""
    accelerator = Accelerator(cpu=True)
    call, name = ODD_ONES[odd]
    deadline = limits.Deadline()
    with pytest.raises(RankDisagreementError, match=rf"rank 0: gather at .*{HERE}.*\n.*rank 1: {name} at .*{HERE}"):
        call(accelerator) if accelerator.process_index else accelerator.gather(torch.ones(1000))
    assert not deadline.is_over


@world(2)
def test_a_gather_inside_a_block_of_the_main_process():
    """A collective in a main-process-first block, which the others wait for, is named instead of hanging."""
    state = PartialState(cpu=True)
    with (
        pytest.raises((RankDisagreementError, RemoteRankError), match=r"main_process_first|main-process-first"),
        state.main_process_first(),
    ):
        collectives.gather(torch.ones(1))


@world(3)
def test_a_failed_operation_in_a_block_of_the_main_process():
    """What a collective in such a block raises on the main process reaches the others once, and nobody waits on."""
    state = PartialState(cpu=True)
    kind = UnsupportedTypeError if state.is_main_process else RemoteRankError
    with pytest.raises(kind), state.main_process_first():
        collectives.gather("text")
    assert collectives.gather(torch.tensor([state.process_index])).tolist() == [0, 1, 2]


@world(2)
def test_models_that_differ_between_ranks():
    """Ranks that prepare models of different sizes are shown which parameter differs."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2 + accelerator.process_index)
    with pytest.raises(RankDisagreementError, match=r"rank 0: prepare.*weight: float32\[2, 2\].*\n.*float32\[3, 2\]"):
        accelerator.prepare(model)


def end():
    """Do what the end of a process does; ranks of a test live on until all are done."""
    process_world.destroy()
    process_world._left = None


ENDED = {
    0: (wait_for_everyone, r"^rank 0 ended without calling .*; is the call inside an `if` on the"),
    1: (
        lambda: collectives.gather(torch.ones(1)),
        rf"^rank 1 ended without calling gather \(.*{HERE}.*\); is the call inside `if accelerator.is_main_process`",
    ),
}


@pytest.mark.parametrize("ended", ENDED)
@world(2)
def test_a_rank_that_has_ended(ended):
    """A rank whose fellow ended in good order is asked the question that finds the mistake, of the main rank or not."""
    if ensure().rank == ended:
        end()
        return
    call, asked = ENDED[ended]
    with pytest.raises(RemoteRankError, match=asked) as caught:
        call()
    assert caught.value.__suppress_context__


@world(2)
def test_the_end_of_a_fork_is_not_that_of_its_rank():
    """A process that a rank forked says nothing when it ends, so the rank is not taken for one that ended."""
    state = PartialState(cpu=True)
    child = os.fork()
    if child == 0:
        signal.alarm(int(limits.limit()))
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert collectives.gather(torch.tensor([state.process_index])).tolist() == [0, 1]
    assert process_world.ended(2) == {}


@world(2)
def test_a_rank_that_has_ended_by_an_error():
    """An error by which a rank ended is named to those that wait for it."""
    if ensure().rank:
        try:
            raise ValueError("no data here")
        except ValueError:
            end()
        return
    with pytest.raises(
        RemoteRankError, match=rf"^gather at .*{HERE}.* because rank 1 failed: ValueError: no data here\."
    ):
        collectives.gather(torch.ones(1))


@world(2)
def test_a_rank_that_has_ended_without_a_word(tmp_path):
    """A rank whose fellow was killed gets an error that names its own operation and line, not the backend's alone."""
    rank = ensure().rank
    torch.distributed.barrier()  # before it, a rank that leaves could leave while the other still joins
    if rank:
        torch.distributed.destroy_process_group()  # as a rank that is killed does, and tells nobody
        assert limits.wait_until((tmp_path / "seen").exists)
        return
    with pytest.raises(RemoteRankError, match=rf"gather at .*{HERE}.*lost the other ranks on rank 0: .*; got "):
        collectives.gather(torch.ones(1))
    (tmp_path / "seen").touch()


def gather_in_thread(results, name=None):
    """Start a thread that gathers its own result or error."""

    def work():
        try:
            results.append(collectives.gather(torch.tensor([ensure().rank])).tolist())
        except Exception as failure:
            results.append(failure)

    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


@world(2)
def test_two_threads_in_a_gather_at_once(tmp_path):
    """While one thread waits in an operation, a second one is refused, and both lines are named."""
    rank = ensure().rank
    collectives.gather(torch.ones(1))
    results = []
    if rank:
        assert limits.wait_until((tmp_path / "refused").exists)
        with pytest.raises(RankDisagreementError, match=r"rank 0: gather in thread 'early' at .*\n.*rank 1: gather at"):
            collectives.gather(torch.tensor([rank]))
        return
    thread = gather_in_thread(results, "early")
    assert limits.wait_until(lambda: transport.open_transport(ensure())._current)
    with pytest.raises(
        CollectiveError, match=rf"got gather at .*{HERE}.* while gather in thread 'early' at .*{HERE}work is under way"
    ):
        collectives.gather(torch.tensor([rank]))
    (tmp_path / "refused").touch()
    thread.join()
    assert isinstance(results[0], CollectiveError)


@world(2)
def test_a_thread_that_gathers_alone():
    """One thread after the other may take part, whatever number Python gave it on each rank."""
    rank = ensure().rank
    for _ in range(rank):
        threading.Thread(target=int).start()
    results = []
    for _ in range(3):
        gather_in_thread(results).join()
        assert collectives.gather(torch.tensor([rank])).tolist() == [0, 1]
    assert results == [[0, 1]] * 3


@world(2)
def test_threads_that_meet_crosswise():
    """The main thread of one rank does not exchange data with another thread of the other rank."""
    results = []
    if ensure().rank:
        gather_in_thread(results).join()
    else:
        with pytest.raises(RankDisagreementError, match=r"rank 0: gather at .*\n.*rank 1: gather in thread 'Thread-"):
            collectives.gather(torch.tensor([0]))
    assert all(isinstance(failure, RankDisagreementError) for failure in results)


@world(2)
def test_wait_for_everyone_waits():
    """No rank passes before all have come."""
    begun = time.monotonic()
    if ensure().rank:
        time.sleep(0.5)
    wait_for_everyone()
    assert time.monotonic() - begun > 0.4


def odd_tensors():
    """Return tensors that have no memory with one value after the other, and how the error calls them."""
    dense = torch.eye(2)
    return {
        "sparse_coo": dense.to_sparse(),
        "sparse_csr": dense.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([dense[0], dense[0, :1]]),
        "meta": torch.empty(2, device="meta"),
    }


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "quantized", "nested", "meta"])
@pytest.mark.parametrize("operation", ["gather", "reduce", "broadcast"])
@pytest.mark.filterwarnings("ignore")
@world(2)
def test_tensors_that_cannot_be_sent(operation, kind):
    """A kind of tensor that no operation carries is refused by name before anything is sent, wherever it is."""
    rank = ensure().rank
    tensor = odd_tensors()[kind]
    call = getattr(collectives, operation)
    with pytest.raises(
        UnsupportedTypeError, match=rf"`{operation}` sends dense tensors; got a {kind} one at \['x'\]\. "
    ):
        call({"x": tensor})
    with pytest.raises(RemoteRankError if rank else UnsupportedTypeError, match=rf"a {kind} one"):
        call(torch.eye(2) if rank else tensor)
    with pytest.raises(RemoteRankError if rank else UnsupportedTypeError, match=r"<class 'str'>"):
        call(torch.eye(2) if rank else {"a": "text"})
    assert collectives.gather(torch.tensor([rank])).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex32])
@pytest.mark.parametrize("nbytes", [24, 2**20, 2**24])
@pytest.mark.filterwarnings("ignore")
@world(2)
def test_sums_of_rare_dtypes(dtype, nbytes):
    """Sums of dtypes that torch hardly computes with equal those of wider ones: in a frame, behind one, and alone."""
    rank = ensure().rank
    wide = torch.complex64 if dtype.is_complex else torch.int64
    mine = torch.arange(nbytes // dtype.itemsize).remainder(50).to(wide) * (1 + rank)
    if dtype.is_complex:
        mine = mine * (1 + 1j)
    total = collectives.reduce(mine.to(dtype), "sum")
    assert total.dtype is dtype
    assert torch.equal(total.to(wide), mine // (1 + rank) * 3 if not dtype.is_complex else mine / (1 + rank) * 3)


@pytest.mark.parametrize("count", [4, 3_000_000])
@world(2)
def test_tensors_that_share_memory_with_their_conjugate(count):
    """Conjugated and negated tensors arrive as what they stand for, small ones and those that travel alone."""
    rank = ensure().rank
    first = torch.arange(count).to(torch.complex64) * (1 + 2j)
    base = first * (rank + 1)
    conjugated, negated = base.conj(), base.conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    expected = torch.cat([first.conj().resolve_conj() * other for other in (1, 2)])
    assert torch.equal(collectives.gather(conjugated), expected)
    assert torch.equal(collectives.gather(negated), expected.imag)
    assert torch.equal(collectives.reduce(conjugated, "sum"), expected[:count] * 3)
    assert torch.equal(collectives.reduce(negated, "sum"), expected[:count].imag * 3)
    collectives.broadcast(conjugated, 1)
    assert torch.equal(conjugated, expected[count:])
