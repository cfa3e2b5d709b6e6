"""What the documentation shows of several processes: all examples in one world of two ranks, each a test of its own."""

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.world import run
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    ProfileKwargs,
    broadcast,
    broadcast_object_list,
    extract_model_from_parallel,
    gather,
    gather_object,
    pad_across_processes,
    patch_environment,
    reduce,
    save,
    set_seed,
    synchronize_rng_states,
    wait_for_everyone,
)
from accelerate.utils.operations import DistributedOperationException

RANKS = 2

Example = Callable[[Accelerator, Path], None]
EXAMPLES: dict[str, Example] = {}


def example(function: Example) -> Example:
    """Let a function run on all ranks, and its outcome be a test."""
    EXAMPLES[function.__name__] = function
    return function


def _model() -> nn.Linear:
    set_seed(5)
    return nn.Linear(2, 1)


def _loader(samples: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(samples, 2, generator=generator), torch.randn(samples, 1, generator=generator))
    return DataLoader(data, batch_size=batch_size)


def _loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _gradient_of(batches: list[int]) -> torch.Tensor:
    """Return the weight's gradient of the mean loss over batches of the whole data, in plain PyTorch."""
    model, data = _model(), list(_loader())
    torch.stack([_loss(model, data[index]) for index in batches]).mean().backward()
    return model.weight.grad


def _gradient(accelerator: Accelerator, model: nn.Module) -> torch.Tensor:
    return accelerator.unwrap_model(model).weight.grad


@example
def the_state_describes_the_run(accelerator: Accelerator, folder: Path) -> None:
    """The label, the numbers and the device are those of two processes on a CPU."""
    state = PartialState()
    assert accelerator.distributed_type is state.distributed_type is DistributedType.MULTI_CPU
    assert accelerator.num_processes == state.num_processes == RANKS
    assert accelerator.process_index == accelerator.local_process_index == int(os.environ["RANK"])
    assert accelerator.is_main_process == accelerator.is_local_main_process == (accelerator.process_index == 0)
    assert accelerator.is_last_process == (accelerator.process_index == RANKS - 1)


@example
def accumulate_exchanges_gradients_once_a_window(accelerator: Accelerator, folder: Path) -> None:
    """Ranks hold one gradient at the end of a window: that of all its batches."""
    accelerator.gradient_accumulation_steps = 2
    model, loader = accelerator.prepare(_model(), _loader())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch))
    torch.testing.assert_close(_gradient(accelerator, model), _gradient_of([0, 1, 2, 3]))


@example
def a_trigger_of_one_rank_is_seen_by_all(accelerator: Accelerator, folder: Path) -> None:
    """A rank sets the trigger, every rank sees it, and then it is reset."""
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


@example
def clipping_is_by_the_norm_of_the_whole_gradient(accelerator: Accelerator, folder: Path) -> None:
    """Clipping after the exchange scales by the norm of the averaged gradient."""
    model, loader = accelerator.prepare(_model(), _loader())
    accelerator.backward(_loss(model, next(iter(loader))))
    expected = torch.cat([_gradient_of([0, 1]).flatten(), extract_model_from_parallel(model).bias.grad]).norm()
    torch.testing.assert_close(accelerator.clip_grad_norm_(model.parameters(), 1e-3), expected)
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    assert _gradient(accelerator, model).abs().max() <= 1e-4


@example
def gather_concatenates_in_the_order_of_ranks(accelerator: Accelerator, folder: Path) -> None:
    """Each rank's tensor is found at its place, by method and by function."""
    tensor = torch.tensor([accelerator.process_index], device=accelerator.device)
    assert accelerator.gather(tensor).tolist() == list(range(RANKS))
    assert gather({"index": (tensor,)})["index"][0].tolist() == list(range(RANKS))


@example
def gather_for_metrics_drops_what_was_repeated(accelerator: Accelerator, folder: Path) -> None:
    """Nine samples in batches of five give nine items, taken without a loop or with one."""
    loader = accelerator.prepare(DataLoader(range(9), batch_size=5))  # type: ignore[arg-type]
    batch = next(iter(loader))
    assert len(accelerator.gather_for_metrics(batch)) == 9
    found = [item for batch in loader for item in accelerator.gather_for_metrics(batch).tolist()]
    assert found == list(range(9))


@example
def gather_for_metrics_takes_objects(accelerator: Accelerator, folder: Path) -> None:
    """Objects of all ranks come together, those that were repeated dropped."""
    loader = accelerator.prepare(DataLoader(range(9), batch_size=5))  # type: ignore[arg-type]
    found = []
    for batch in loader:
        found += accelerator.gather_for_metrics([str(item) for item in batch.tolist()], use_gather_object=True)
    assert found == [str(index) for index in range(9)]


@example
def state_dict_is_the_plain_models(accelerator: Accelerator, folder: Path) -> None:
    """The state dict of a distributed model has the plain names on every rank."""
    net = accelerator.prepare(_model())
    assert set(accelerator.get_state_dict(net)) == {"weight", "bias"}


@example
def uneven_inputs_are_joined(accelerator: Accelerator, folder: Path) -> None:
    """A rank with fewer batches goes along, and the weights stay equal on all ranks."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader(samples=6))
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    assert batches == 2 - accelerator.process_index
    weights = accelerator.gather(accelerator.unwrap_model(model).weight)
    assert torch.equal(weights[0], weights[1])


@example
def one_process_goes_first(accelerator: Accelerator, folder: Path) -> None:
    """The main process, of all and of the machine, is through before others enter."""
    for name in ("main_process_first", "local_main_process_first"):
        path = folder / name
        with getattr(accelerator, name)():
            if accelerator.is_main_process:
                time.sleep(0.05)
                path.touch()
            assert path.exists()


@example
def everyone_is_waited_for(accelerator: Accelerator, folder: Path) -> None:
    """Nobody passes before all are there, by method and by function."""
    for name, wait in (("method", accelerator.wait_for_everyone), ("function", wait_for_everyone)):
        if accelerator.is_main_process:
            time.sleep(0.05)
            (folder / name).touch()
        wait()
        assert (folder / name).exists()


@example
def gradients_are_exchanged_after_no_sync(accelerator: Accelerator, folder: Path) -> None:
    """Inside `no_sync` a rank keeps its own gradient; the next pass exchanges the sum."""
    model, loader = accelerator.prepare(_model(), _loader())
    first, second = list(loader)
    with accelerator.no_sync(model):
        accelerator.backward(_loss(model, first))
    torch.testing.assert_close(_gradient(accelerator, model), _gradient_of([accelerator.process_index]))
    accelerator.backward(_loss(model, second))
    torch.testing.assert_close(_gradient(accelerator, model), 2 * _gradient_of([0, 1, 2, 3]))


@example
def an_exchange_can_be_triggered_in_backward(accelerator: Accelerator, folder: Path) -> None:
    """Two forward passes without exchange, the second backward pass with one."""
    model, loader = accelerator.prepare(_model(), _loader())
    first, second = list(loader)
    with accelerator.no_sync(model):
        loss_a, loss_b = _loss(model, first), _loss(model, second)
        accelerator.backward(loss_a)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss_b)
    torch.testing.assert_close(_gradient(accelerator, model), 2 * _gradient_of([0, 1, 2, 3]))


@example
def decorated_functions_run_on_one_process(accelerator: Accelerator, folder: Path) -> None:
    """Each decorator, of the Accelerator and of the state, lets one rank run and gives the others None."""
    rank = accelerator.process_index

    def act() -> str:
        return "ran"

    for owner in (accelerator, PartialState()):
        for name, chosen in (("on_main_process", 0), ("on_local_main_process", 0), ("on_last_process", RANKS - 1)):
            assert getattr(owner, name)(act)() == ("ran" if rank == chosen else None)
        assert owner.on_process(process_index=1)(act)() == ("ran" if rank == 1 else None)
        assert owner.on_local_process(local_process_index=1)(act)() == ("ran" if rank == 1 else None)


@example
def padding_makes_sizes_equal(accelerator: Accelerator, folder: Path) -> None:
    """Tensors of other sizes are padded at the end or the beginning, so that they can be gathered."""
    rank = accelerator.process_index
    tensor = torch.arange(rank + 1).to(accelerator.device)
    assert accelerator.pad_across_processes(tensor).shape == torch.Size([RANKS])
    padded = pad_across_processes({"a": tensor}, pad_index=-1, pad_first=True)
    assert accelerator.gather(padded["a"]).tolist() == [-1, 0, 0, 1]
    assert accelerator.pad_across_processes(torch.ones(1, rank + 1), dim=1).shape == (1, RANKS)


@example
def printing_is_done_once(accelerator: Accelerator, folder: Path) -> None:
    """Only the first process of the machine prints."""
    with (folder / f"printed-{accelerator.process_index}").open("w") as file:
        accelerator.print("Hello world!", file=file)
    printed = (folder / f"printed-{accelerator.process_index}").read_text()
    assert printed == ("Hello world!\n" if accelerator.is_local_main_process else "")


@example
def a_profile_is_written_by_every_rank(accelerator: Accelerator, folder: Path) -> None:
    """Each rank's trace lies in the folder that the handler names."""
    with accelerator.profile(ProfileKwargs(output_trace_dir=str(folder / "traces"))):
        torch.ones(2, 2) @ torch.ones(2, 2)
    accelerator.wait_for_everyone()
    assert len(list((folder / "traces").iterdir())) == RANKS


@example
def reduce_adds_up_or_takes_the_mean(accelerator: Accelerator, folder: Path) -> None:
    """The method adds up, the function takes the mean, unless they are told otherwise."""
    tensor = torch.arange(accelerator.num_processes) + 1 + (2 * accelerator.process_index)
    tensor = tensor.to(accelerator.device)
    assert accelerator.reduce(tensor, reduction="sum").tolist() == [4, 6]
    assert accelerator.reduce(tensor).tolist() == [4, 6]
    assert reduce({"a": tensor.float()})["a"].tolist() == [2, 3]


@example
def a_file_is_written_once(accelerator: Accelerator, folder: Path) -> None:
    """The main process writes the object, by method and by function."""
    accelerator.save([accelerator.process_index], str(folder / "method.pkl"))
    save([accelerator.process_index], str(folder / "function.pkl"))
    accelerator.wait_for_everyone()
    assert torch.load(folder / "method.pkl") == torch.load(folder / "function.pkl") == [0]


@example
def a_run_is_saved_and_restored(accelerator: Accelerator, folder: Path) -> None:
    """Weights and each rank's own random state come back."""
    model = accelerator.prepare(_model())
    inner = accelerator.unwrap_model(model)
    before = inner.weight.detach().clone()
    torch.manual_seed(accelerator.process_index)
    accelerator.save_state(output_dir=str(folder / "my_checkpoint"))
    drawn = torch.rand(2)
    nn.init.zeros_(inner.weight)
    accelerator.load_state(str(folder / "my_checkpoint"))
    assert torch.equal(inner.weight, before)
    assert torch.equal(torch.rand(2), drawn)


@example
def first_batches_are_skipped(accelerator: Accelerator, folder: Path) -> None:
    """Each rank skips as many of its own batches; the loader itself goes on as it was."""
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2))  # type: ignore[arg-type]
    own = [batch.tolist() for batch in loader]
    assert len(own) == 3
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, num_batches=2)] == own[2:]
    assert [batch.tolist() for batch in loader] == own


@example
def inputs_are_split_between_processes(accelerator: Accelerator, folder: Path) -> None:
    """The first rank gets one more where the number is odd; padding repeats the last."""
    rank = accelerator.process_index
    for owner in (accelerator, PartialState()):
        with owner.split_between_processes(["A", "B", "C"]) as inputs:
            assert inputs == (["A", "B"], ["C"])[rank]
        with owner.split_between_processes(["A", "B", "C"], apply_padding=True) as inputs:
            assert inputs == (["A", "B"], ["C", "C"])[rank]
        with owner.split_between_processes({"a": [1, 2, 3], "b": torch.arange(3)}) as inputs:
            assert inputs["a"] == ([1, 2], [3])[rank]
            assert inputs["b"].tolist() == ([0, 1], [2])[rank]
        with pytest.raises(ValueError), owner.split_between_processes({"a": [1, 2], "b": [1]}):
            pytest.fail("values of a dict need equal lengths")


@example
def the_wrapper_is_taken_off(accelerator: Accelerator, folder: Path) -> None:
    """A prepared model is torch's data parallel; what comes out is the model itself."""
    given = _model()
    model = accelerator.prepare(given)
    assert isinstance(model, DistributedDataParallel)
    assert accelerator.unwrap_model(model) is extract_model_from_parallel(model) is given


@example
def batches_are_shared_out(accelerator: Accelerator, folder: Path) -> None:
    """Each rank reads its own batches, of the loader's size, or of a part of it with `split_batches`."""
    rank = accelerator.process_index
    loader = accelerator.prepare_data_loader(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])[rank]
    accelerator.dataloader_config.split_batches = True
    loader = accelerator.prepare_data_loader(DataLoader(range(8), batch_size=4))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])[rank]


@example
def one_rank_reads_for_all(accelerator: Accelerator, folder: Path) -> None:
    """With `dispatch_batches` the main process reads, and the batches are cut for each rank."""
    accelerator.dataloader_config.dispatch_batches = True
    loader = accelerator.prepare_data_loader(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    own = [batch.tolist() for batch in loader]
    assert own == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])[accelerator.process_index]


@example
def first_samples_make_batches_even(accelerator: Accelerator, folder: Path) -> None:
    """Every rank gets as many batches of one size, samples from the start repeated; or not, where that is off."""
    rank = accelerator.process_index
    loader = accelerator.prepare_data_loader(DataLoader(range(5), batch_size=2))  # type: ignore[arg-type]
    assert [len(batch) for batch in loader] == [2, 2]
    accelerator.even_batches = False
    loader = accelerator.prepare_data_loader(DataLoader(range(5), batch_size=2))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == ([[0, 1], [4]], [[2, 3]])[rank]


@example
def a_tensor_is_broadcast(accelerator: Accelerator, folder: Path) -> None:
    """Every rank has the tensors of the rank that is named."""
    tensor = torch.tensor([float(accelerator.process_index)])
    assert broadcast({"a": [tensor.clone()]}, from_process=1)["a"][0].item() == 1
    assert broadcast(tensor.clone()).item() == 0


@example
def objects_are_broadcast_and_gathered(accelerator: Accelerator, folder: Path) -> None:
    """Lists of objects are those of one rank, or of all ranks one after the other."""
    rank = accelerator.process_index
    assert broadcast_object_list([{"rank": rank}, "word"], from_process=1) == [{"rank": 1}, "word"]
    assert gather_object([f"rank {rank}"]) == ["rank 0", "rank 1"]


@example
def seeds_differ_by_device_where_asked(accelerator: Accelerator, folder: Path) -> None:
    """A seed is one for all ranks, or another for each."""
    set_seed(7)
    same = gather_object([torch.rand(1).item()])
    set_seed(7, device_specific=True)
    other = gather_object([torch.rand(1).item()])
    assert same[0] == same[1]
    assert other[0] != other[1]


@example
def random_states_are_synchronized(accelerator: Accelerator, folder: Path) -> None:
    """All ranks go on from the state of the first."""
    torch.manual_seed(accelerator.process_index)
    synchronize_rng_states(["torch"])
    drawn = gather_object([torch.rand(1).item()])
    assert drawn[0] == drawn[1]


@example
def debug_mode_checks_shapes_before_an_operation(accelerator: Accelerator, folder: Path) -> None:
    """With ACCELERATE_DEBUG_MODE, tensors of other shapes are an error on every rank instead of a hang."""
    with patch_environment(ACCELERATE_DEBUG_MODE="1"):
        AcceleratorState._reset_state(reset_partial_state=True)
        debugged = Accelerator(cpu=True)
        with pytest.raises(DistributedOperationException, match=r"(?s)gather.*1.*2"):
            debugged.gather(torch.ones(1 + debugged.process_index))


def _run_examples(folder: str) -> None:
    found = dict.fromkeys(EXAMPLES, "was not reached")
    for name, function in EXAMPLES.items():
        own = Path(folder) / name
        own.mkdir(exist_ok=True)
        try:
            function(Accelerator(cpu=True), own)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run all examples in one world, and return what failed on each rank, by example."""
    folder = tmp_path_factory.mktemp("examples")
    failure = run(_run_examples, RANKS, (str(folder),))
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [rank[name] for rank in ranks] + [failure or ""] for name in EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_on_two_ranks(name: str, outcomes: dict[str, list[str]]) -> None:
    """An example of the documentation holds on both ranks."""
    assert outcomes[name] == [""] * (RANKS + 1)
