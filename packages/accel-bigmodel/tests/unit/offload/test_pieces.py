"""Weights on "disk" that stay in a store are fetched when they are needed, within a cache, and compute the same."""

import atexit
import copy
import gc
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    get_state_dict_offloaded_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel_bigmodel.checkpoint.load import loading_index
from accel_bigmodel.offload.index import MappedFile
from accel_bigmodel.offload.pieces import Away, PieceCache, away
from accel_core.checkpoint.weights import save_model
from accel_core.errors import CheckpointDamagedError, CheckpointError, ConfigurationError
from accel_core.testing.limits import limit, wait_for_fork

fsspec = pytest.importorskip("fsspec")

WIDTH, LAYERS = 32, 6
LAYER = (WIDTH * WIDTH + WIDTH) * 4
"""Bytes of one layer."""

INPUTS = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def layers(seed: int = 0) -> nn.Sequential:
    """Make a model of layers, the same for each seed."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Compute without graphs, which hold the weights of all blocks until a backward pass."""
    with torch.no_grad():
        yield


@pytest.fixture
def bucket(fresh_state: None) -> Iterator[str]:
    """Return the address of an empty bucket in memory."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield "memory://bucket"
    store.store.clear()


def loaded(
    address: str, device_map: dict[str, str], cache: int | str | None, folder: Path, prefetch: bool | None = None
) -> nn.Module:
    """Load the model from a store."""
    with init_empty_weights():
        model = layers()
    return load_checkpoint_and_dispatch(
        model, address, device_map=device_map, offload_cache=cache, offload_folder=folder, prefetch=prefetch
    )


def sources(model: nn.Module) -> list[Away]:
    """Return where the bytes of a model's files are."""
    paths = {entry["safetensors_file"] for entry in loading_index(model).values()}
    found = [each for each in map(away, sorted(paths)) if each is not None]
    assert len(found) == len(paths) > 0
    return found


def fetched(model: nn.Module) -> int:
    """Return how many bytes came from the store of a model."""
    return sources(model)[0].file.store.traffic.bytes


def on_disk(folder: Path) -> int:
    """Return how many bytes of weights lie in a folder."""
    found = 0
    for path in folder.rglob("piece-*"):
        with suppress(FileNotFoundError):  # another piece took its room
            found += path.stat().st_size
    return found


def headers(address: str) -> int:
    """Return how many bytes tell which tensors are at an address: lengths, read twice, headers and indices."""
    found = fsspec.filesystem("memory").find(address)
    raw = {name: fsspec.filesystem("memory").cat_file(name) for name in found}
    lengths = [16 + struct.unpack("<Q", each[:8])[0] for name, each in raw.items() if name.endswith(".safetensors")]
    return sum(lengths) + sum(len(each) for name, each in raw.items() if name.endswith(".json"))


@pytest.mark.parametrize("limit", ["10GB", "5KB"])
@pytest.mark.parametrize("cache", [None, "1MiB", LAYER])
def test_blocks_are_fetched_when_they_run(bucket: str, tmp_path: Path, limit: str, cache: int | str | None) -> None:
    """Nothing but headers is fetched at the load, each block by its forward, and what is near is not fetched again."""
    save_model(layers(), None, f"{bucket}/weights", max_shard_size=limit)
    model = loaded(f"{bucket}/weights", {"": "disk"}, cache, tmp_path)
    begun = fetched(model)
    assert begun == headers(f"{bucket}/weights")
    assert on_disk(tmp_path) == 0
    whole = layers()(INPUTS)
    assert torch.equal(model(INPUTS), whole)
    assert fetched(model) - begun == LAYERS * LAYER
    assert torch.equal(model(INPUTS), whole)
    again = fetched(model) - begun - LAYERS * LAYER
    assert again == 0 if cache != LAYER else 0 < again <= LAYERS * LAYER
    assert on_disk(tmp_path) <= (LAYER if cache == LAYER else LAYERS * LAYER)


@pytest.mark.parametrize("prefetch", [None, False])
def test_the_cache_stays_within_its_bound(bucket: str, tmp_path: Path, prefetch: bool | None) -> None:
    """At no forward of a layer is more on the disk than the cache may hold, and what it holds is used again."""
    save_model(layers(), None, f"{bucket}/weights")
    budget = 3 * LAYER + 1
    with init_empty_weights():
        model = layers()
    model = load_checkpoint_and_dispatch(
        model,
        f"{bucket}/weights",
        device_map={"": "disk"},
        offload_cache=budget,
        offload_folder=tmp_path,
        prefetch=prefetch,
    )
    seen: list[int] = []
    for layer in model.children():
        layer.register_forward_hook(lambda *_: seen.append(on_disk(tmp_path)))
    for _ in range(4):
        before = fetched(model)
        assert torch.equal(model(INPUTS), layers()(INPUTS))
    assert 0 < fetched(model) - before < (LAYERS - (prefetch is False)) * LAYER
    assert max(seen) <= budget


def test_the_next_block_is_fetched_while_one_computes(bucket: str, tmp_path: Path) -> None:
    """Where the order is known, the weights of the next block are on their way when one computes."""
    save_model(layers(), None, f"{bucket}/weights")
    model = loaded(f"{bucket}/weights", {"": "disk"}, 3 * LAYER, tmp_path)
    model(INPUTS)
    cache = sources(model)[0].cache
    assert cache is not None
    coming: list[bool] = []

    def look(layer: nn.Module, *_: object) -> None:
        coming.append(any(piece.awaited for piece in cache._pieces.values()))

    for layer in list(model.children())[1:-2]:
        layer.register_forward_hook(look)
    assert torch.equal(model(INPUTS), layers()(INPUTS))
    assert all(coming)


def test_parts_in_memory_are_read_into_memory(bucket: str, tmp_path: Path) -> None:
    """Of a model that is partly on the disk, the rest comes once at the load, and leaves nothing on the disk."""
    save_model(layers(), None, f"{bucket}/weights")
    device_map = {str(number): "disk" if number % 3 else "cpu" for number in range(LAYERS)}
    model = loaded(f"{bucket}/weights", device_map, LAYER, tmp_path)
    assert fetched(model) == headers(f"{bucket}/weights") + 2 * LAYER
    assert on_disk(tmp_path) == 0
    fsspec.filesystem("memory").rm_file(f"{bucket}/weights/model.safetensors")
    assert torch.equal(model[0](INPUTS), layers()[0](INPUTS))  # type: ignore[index]


def test_a_store_that_fails_is_named_and_asked_again(bucket: str, tmp_path: Path) -> None:
    """A forward whose weights cannot be fetched raises, the next one that finds them computes the same."""
    save_model(layers(), None, f"{bucket}/weights", max_shard_size="5KB")
    model = loaded(f"{bucket}/weights", {"": "disk"}, 2 * LAYER, tmp_path)
    store = fsspec.filesystem("memory")
    kept = {name: store.cat_file(name) for name in store.find(f"{bucket}/weights") if "00003-of" in name}
    (name,) = kept
    assert torch.equal(model(INPUTS), layers()(INPUTS))
    store.rm_file(name)
    for _ in range(2):
        with pytest.raises(CheckpointDamagedError, match="is not in the store; got no weights-"):
            model(INPUTS)
    store.pipe_file(name, kept[name])
    assert torch.equal(model(INPUTS), layers()(INPUTS))


def test_a_load_that_fails_leaves_the_model_as_it_was(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a store loses a shard between the headers and the weights, no weight of the model was replaced."""
    save_model(layers(), None, f"{bucket}/weights", max_shard_size="5KB")
    with init_empty_weights():
        model = layers()
    before = dict(model.named_parameters())
    last = next(name for name in fsspec.filesystem("memory").find(f"{bucket}/weights") if "00006-of" in name)
    expect = Away.expect

    def losing(self: Away, ranges: object) -> None:
        if self.file.name in last:
            fsspec.filesystem("memory").rm_file(last)
        expect(self, ranges)  # type: ignore[arg-type]

    monkeypatch.setattr(Away, "expect", losing)
    device_map = {str(number): "disk" if number == 0 else "cpu" for number in range(LAYERS)}
    with pytest.raises(CheckpointDamagedError, match="is not in the store"):
        load_checkpoint_in_model(model, f"{bucket}/weights", device_map, tmp_path)
    assert all(value is before[name] for name, value in model.named_parameters())


def test_weights_that_are_replaced_are_no_mixture(bucket: str, tmp_path: Path) -> None:
    """After another model was saved at the address, a block that is not here yet is an error by name."""
    save_model(layers(), None, f"{bucket}/weights")
    model = loaded(f"{bucket}/weights", {"": "disk"}, None, tmp_path, prefetch=False)
    model[0](INPUTS)  # type: ignore[index]
    save_model(layers(1), None, f"{bucket}/weights")
    assert torch.equal(model[0](INPUTS), layers()[0](INPUTS))  # type: ignore[index]
    with pytest.raises(CheckpointError, match="were replaced while they were in use"):
        model(INPUTS)


def test_options_that_cannot_be_kept_are_refused(bucket: str, tmp_path: Path) -> None:
    """A cache that is smaller than a module, and one of weights that are read whole, are refused; nothing changes."""
    save_model(layers(), None, f"{bucket}/weights")
    save_model(layers(), None, f"{bucket}/pickled", safe_serialization=False)
    save_file(layers().state_dict(), tmp_path / "model.safetensors")
    for address, cache, words in (
        (f"{bucket}/weights", LAYER - 1, "of the largest module"),
        (f"{bucket}/pickled", "1MiB", "which is read whole"),
        (str(tmp_path), "1MiB", "which is read whole"),
    ):
        with init_empty_weights():
            model = layers()
        with pytest.raises(ConfigurationError, match=words):
            load_checkpoint_and_dispatch(model, address, device_map={"": "disk"}, offload_cache=cache)
        assert all(parameter.is_meta for parameter in model.parameters())
    with init_empty_weights():
        model = layers()
    model = load_checkpoint_and_dispatch(model, f"{bucket}/pickled", device_map={"": "disk"}, offload_folder=tmp_path)
    assert torch.equal(model(INPUTS), layers()(INPUTS))


def test_values_that_are_held_stay_what_they_are(bucket: str, tmp_path: Path) -> None:
    """A state dict of more than the cache holds has all values, also while other blocks run; then the room is free."""
    save_model(layers(), None, f"{bucket}/weights")
    model = loaded(f"{bucket}/weights", {"": "disk"}, LAYER, tmp_path)
    held = get_state_dict_offloaded_model(model)
    model(INPUTS)
    for name, value in layers().state_dict().items():
        assert torch.equal(held[name], value)
    del held
    gc.collect()
    assert torch.equal(copy.deepcopy(model)(INPUTS), layers()(INPUTS))
    assert on_disk(tmp_path) <= LAYER


def test_threads_share_the_cache(bucket: str, tmp_path: Path) -> None:
    """Forwards of several threads, with less room than two blocks take, all compute the same."""
    save_model(layers(), None, f"{bucket}/weights")
    model = loaded(f"{bucket}/weights", {"": "disk"}, LAYER, tmp_path)
    whole, equal = layers()(INPUTS), []

    def run() -> None:
        with torch.no_grad():
            equal.extend(torch.equal(model(INPUTS), whole) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 15


def test_shared_weights_stay_and_blocks_around_them_are_fetched(bucket: str, tmp_path: Path) -> None:
    """A weight that two modules share is one weight, fetched once and kept, with a cache that has room for it."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(8, WIDTH), layers(), nn.Linear(WIDTH, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(tokens)))

    plain, tokens = Tied(), torch.arange(8)
    save_model(plain, None, f"{bucket}/weights")
    with init_empty_weights():
        model: nn.Module = Tied()
    table = 8 * WIDTH * 4
    model = load_checkpoint_and_dispatch(
        model, f"{bucket}/weights", device_map={"": "disk"}, offload_cache=LAYER + table, offload_folder=tmp_path
    )
    assert fetched(model) == headers(f"{bucket}/weights") + table
    for _ in range(2):
        assert torch.equal(model(tokens), plain(tokens))
    assert on_disk(tmp_path) <= LAYER + table


def test_a_machine_without_threads_fetches_by_itself(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started, as while an interpreter shuts down, each block fetches its own weights."""
    save_model(layers(), None, f"{bucket}/weights")
    model = loaded(f"{bucket}/weights", {"": "disk"}, "1MiB", tmp_path)

    class Threadless(ThreadPoolExecutor):
        def submit(self, *_: object) -> NoReturn:  # type: ignore[override]
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr("accel_bigmodel.offload.pieces.ThreadPoolExecutor", Threadless)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=torch.no_grad()(lambda: found.append(model(INPUTS))), daemon=True)
    thread.start()
    thread.join(limit())
    assert torch.equal(found[0], layers()(INPUTS))


def test_a_forked_process_leaves_the_cache_behind(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for no thread of its parent, and its end deletes nothing that its parent uses."""
    save_model(layers(), None, f"{bucket}/weights")
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", ends.append)
    model, expected = loaded(f"{bucket}/weights", {"": "disk"}, "1MiB", tmp_path), layers()(INPUTS)
    found, goes_on = sources(model)[0], threading.Event()
    assert found.cache is not None
    fetch = PieceCache._fetch

    def slow(*arguments: Any) -> None:
        goes_on.wait()
        fetch(*arguments)

    monkeypatch.setattr(PieceCache, "_fetch", slow)
    entry = MappedFile(loading_index(model)["0.weight"]["safetensors_file"], source=found).entries["0.weight"]
    found.cache.send_for(found.file, entry.start, entry.stop)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            goes_on.set()
            status = int(not torch.equal(model(INPUTS), expected))
            for end in ends:
                end()
        finally:
            os._exit(status)
    ended = wait_for_fork(child)
    goes_on.set()
    assert ended == 0, "hung, or wrong"
    assert torch.equal(model(INPUTS), expected)
    for end in ends:
        end()
