"""Pages of weights in files: they stay while there is memory, and need no address space where that is scarce."""

import gc
import json
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import align_module_device, load_checkpoint_and_dispatch
from accel_bigmodel.offload.prefetch import MapTransport
from accel_core.errors import CheckpointError, ConfigurationError, OffloadError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of files are mapped on Linux alone")
WIDTH, LAYERS = 512, 16
ONE = WIDTH * WIDTH * 4
MIB = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a checkpoint of 16 MiB."""
    torch.manual_seed(0)
    save_file({f"{number}.weight": torch.randn(WIDTH, WIDTH) for number in range(LAYERS)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def on_disk(file: Path, width: int = WIDTH, **arguments: object) -> nn.Module:
    """Dispatch it with all weights in the file."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    places = {str(number): "disk" for number in range(LAYERS)}
    return load_checkpoint_and_dispatch(model, file, device_map=places, **arguments)  # type: ignore[arg-type]


def mapped(file: Path) -> int:
    """Return how many bytes of a file are mapped into this process and in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.parametrize(("keep", "least", "most"), [(None, 16, 16), (True, 16, 16), (False, 0, 2)])
def test_pages_stay_unless_they_shall_go(file: Path, keep: bool | None, least: int, most: int) -> None:
    """By default those of all blocks are still mapped after a forward; they are no memory of the process's own."""
    model = on_disk(file, keep_pages=keep)
    with torch.no_grad():
        first, again = model(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH))
    assert torch.equal(first, again)
    assert least * ONE <= mapped(file) <= most * ONE + mmap.PAGESIZE


def test_pages_that_nothing_would_release_are_refused(file: Path) -> None:
    """Prefetching releases them; without it they would stay, whatever was asked."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    with pytest.raises(ConfigurationError, match="keep_pages=False and prefetch=False"):
        load_checkpoint_and_dispatch(model, file, device_map={"": "cpu"}, keep_pages=False, prefetch=False)
    assert all(each.is_meta for each in model.parameters())


def test_pages_go_where_memory_has_no_room_for_all() -> None:
    """A model of more bytes than this machine has does not keep its pages."""
    assert MapTransport(1, None)._keeps()
    assert not MapTransport(2**60, None)._keeps()
    assert MapTransport(2**60, True)._keeps()


@contextmanager
def little_address_space() -> Iterator[None]:
    """Leave this process 96 MiB of address space."""
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 96 * MIB, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.slow
def test_a_model_larger_than_the_address_space_runs(tmp_path: Path) -> None:
    """256 MiB in files of 64 run where 96 are left: each weight is mapped while its block runs; changes are named."""
    width, names = 2048, [f"{number}.weight" for number in range(LAYERS)]
    files = {name: f"{number // 4}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: 2 * torch.eye(width) for name in names if files[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    inputs = torch.ones(1, width)
    on_disk(index, width)(inputs)  # threads and buffers come with the first forward
    with little_address_space(), torch.no_grad():
        model = on_disk(index, width)
        assert torch.equal(model(inputs), 2**LAYERS * inputs)
        with align_module_device(model[3]):  # type: ignore[index]
            model[3].weight.zero_()  # type: ignore[index,operator]
        assert torch.equal(model(inputs), 0 * inputs)
        os.utime(tmp_path / "0.safetensors", ns=(0, 0))
        with pytest.raises(OffloadError, match="changed after the model was dispatched"):
            model(inputs)


def test_a_file_that_the_address_space_does_not_hold_is_named(file: Path) -> None:
    """Its header is read through a map of all of it; the error says what to do."""
    with file.open("ab") as out:
        out.truncate(200 * MIB)
    with little_address_space(), pytest.raises(CheckpointError, match=r"no room for .*a\.safetensors.*ulimit -v"):
        on_disk(file)
