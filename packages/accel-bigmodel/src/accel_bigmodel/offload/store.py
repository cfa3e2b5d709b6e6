"""Mappings that give offloaded weights by name, and the documented offload folder (`index.json` and `.dat` files)."""

import errno
import json
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accel_bigmodel.offload.index import MappedFile
from accel_core.checkpoint.manifest import check_name, read_json
from accel_core.checkpoint.tensor_file import StoredTensor
from accel_core.comm.transport import memory_of
from accel_core.errors import CheckpointError, ConfigurationError, OffloadError, UnsafeCheckpointError, undone_by
from accel_core.modules.sizes import as_dtype

INDEX_NAME = "index.json"

_IN_PLACE = ("safetensors_file", "gguf_file")
"""Keys of files that are used as they are."""


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: MutableMapping[str, Any] | None = None,
) -> MutableMapping[str, Any] | None:
    """Write one weight into an offload folder, as `<name>.dat` of raw little-endian values.

    The format has no strides: a weight of another layout (channels_last, transposed) comes back equal and contiguous.

    Args:
        weight: The tensor.
        weight_name: Its name, relative to the folder.
        offload_folder: The folder, which must exist.
        index: Where the weight's dtype and shape are noted.

    Returns:
        `index`, with the entry added; None when none was passed.

    Raises:
        OffloadError: When the file cannot be written.
        UnsafeCheckpointError: When the name is absolute or leads out of the folder.

    Examples:
        >>> offload_weight(torch.ones(2, 3), "table", ".", index={})
        {'table': {'dtype': 'float32', 'shape': [2, 3]}}
    """
    path = _data_file(offload_folder, weight_name)
    tensor = weight.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        _write_whole(path, memory_of(tensor))
    except (OSError, UnicodeEncodeError) as failure:
        raise OffloadError(
            f"An offloaded weight cannot be written; got {failure} for {weight_name!r}. Choose an `offload_folder` "
            "that exists, can be written and has room."
        ) from failure
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def _write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file beside its place, then move it there in one step: a process that maps the old file keeps it."""
    if path.is_symlink():  # what lies in the folder may point anywhere
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    part = path.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    part.unlink(missing_ok=True)
    with undone_by(lambda: part.unlink(missing_ok=True)):
        with open(part, "xb") as file:
            file.write(content)
        os.replace(part, path)


def _data_file(folder: str | os.PathLike[str], weight_name: str) -> Path:
    """Return where a weight's values lie, inside the folder whatever its name."""
    check_name(f"{weight_name}.dat", Path(folder))
    return Path(folder) / f"{weight_name}.dat"


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Read one weight of an offload folder through a memory map.

    Args:
        weight_file: The `.dat` file.
        weight_info: Its entry of the index: `dtype` and `shape`.

    Returns:
        The weight, a view of the map.

    Raises:
        OffloadError: When the file's size is not that of the dtype and shape.

    Examples:
        >>> index = offload_weight(torch.arange(3.0), "rates", ".", index={})
        >>> load_offloaded_weight("rates.dat", index["rates"])
        tensor([0., 1., 2.])
    """
    return _map_weight(weight_file, weight_info).tensor("")


def _map_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> MappedFile:
    dtype, shape = _form(weight_info, weight_file)
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    file = MappedFile(weight_file, {"": StoredTensor(dtype, shape, 0, count)})
    if file.size != count and not (count == 0):
        raise OffloadError(
            f"An offloaded weight is incomplete; got {file.size} bytes in {os.fspath(weight_file)!r} where {dtype} of "
            f"shape {shape} takes {count}. Offload the model again."
        )
    return file


def _form(info: Mapping[str, Any], where: str | os.PathLike[str]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of an entry of an index, which may hold anything."""
    name: Any = info.get("dtype")
    shape: Any = info.get("shape")
    try:
        dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name))
        # Left to torch, which also refuses sizes whose product overflows.
        return dtype, tuple(torch.empty(tuple(shape), dtype=dtype, device="meta").shape)
    except (AttributeError, RuntimeError, TypeError, OverflowError) as failure:
        raise OffloadError(
            f"An entry of an offload index is not the dtype and shape of a tensor; got {name!r:.40} and {shape!r:.80} "
            f"for {os.fspath(where)!r}. Offload the model again."
        ) from failure


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Write the index of an offload folder; entries that it already has stay.

    Args:
        index: Dtype and shape, or safetensors file, by weight name. An empty index writes nothing.
        offload_folder: The folder.

    Raises:
        OffloadError: When the index cannot be read or written; it is as it was.
        UnsafeCheckpointError: When a name or file is absolute or leads out of the folder; nothing was written.

    Examples:
        >>> import os
        >>> os.mkdir("indexed")
        >>> index = offload_weight(torch.ones(2, 3), "table", "indexed", index={})
        >>> save_offload_index(index, "indexed")
    """
    if not index:
        return
    for name, entry in index.items():
        _check_entry(name, entry, Path(offload_folder) / INDEX_NAME)
    path = os.path.join(offload_folder, INDEX_NAME)
    entries = _read_index(offload_folder) if os.path.isfile(path) else {}
    entries.update(index)
    try:
        _write_whole(Path(path), json.dumps(entries, indent=2).encode())
    except OSError as failure:
        raise OffloadError(
            f"The index of an offload folder cannot be written; got {failure}. Choose an `offload_folder` that can be "
            "written and has room."
        ) from failure


def _read_index(offload_folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the index of a folder; what it names lies in the folder, or it is refused."""
    path = Path(offload_folder) / INDEX_NAME
    try:
        entries = read_json(path.parent, path.name)
    except (OSError, CheckpointError) as failure:
        if isinstance(failure, UnsafeCheckpointError):
            raise
        raise OffloadError(
            f"The index of an offload folder cannot be read; got {failure} for {str(path)!r}. Offload the model again."
        ) from failure
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise OffloadError(
            f"The index of an offload folder is not a mapping of entries; got a {type(entries).__name__} in "
            f"{str(path)!r}. Offload the model again."
        )
    for name, entry in entries.items():
        _check_entry(name, entry, path)
    return entries


def _check_entry(name: str, entry: Mapping[str, Any], index: Path) -> None:
    """Refuse an entry of an index on disk that leads elsewhere; one that the user passes may lead anywhere."""
    files = [entry[key] for key in (*_IN_PLACE, "dat_file") if entry.get(key) is not None]
    for file in files or [f"{name}.dat"]:
        try:
            os.fsencode(file)
        except (TypeError, UnicodeEncodeError) as failure:
            raise OffloadError(
                f"The index of an offload folder names a file that cannot be; got {file!r:.40} for {name!r} in "
                f"{str(index)!r}. Offload the model again."
            ) from failure
        check_name(file, index)
        if not Path(os.path.realpath(index.parent / file)).is_relative_to(os.path.realpath(index.parent)):
            raise UnsafeCheckpointError(
                f"A link in an offload folder leads out of it; got {file!r} in {str(index)!r}. Copy the file into the "
                "folder if you trust it."
            )


def _resolved(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return an entry of an index on disk with its files where they are: beside the index."""
    files = {key: str(folder / entry[key]) for key in (*_IN_PLACE, "dat_file") if entry.get(key) is not None}
    return {**entry, **files}


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write a state dict as an offload folder.

    Args:
        save_dir: The folder, made when it does not exist.
        state_dict: The tensors by name.

    Raises:
        OffloadError: When the folder cannot be written.
        UnsafeCheckpointError: When a name is absolute or leads out of the folder; nothing was written.

    Examples:
        >>> offload_state_dict("offloaded", model.state_dict())
        >>> import os
        >>> sorted(os.listdir("offloaded"))[:2]
        ['blocks.0.layer.bias.dat', 'blocks.0.layer.weight.dat']
    """
    for name in state_dict:
        _data_file(save_dir, name)  # names that cannot be are refused before anything is written
    try:
        os.makedirs(save_dir, exist_ok=True)
    except OSError as failure:
        raise OffloadError(
            f"An offload folder cannot be made; got {failure}. Choose an `offload_folder` that can be written."
        ) from failure
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index=index)
    save_offload_index(index, save_dir)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Take the part of a state dict that belongs to some submodules."""
    names = tuple(submodule_names)
    below = tuple(f"{name}." for name in names)
    return {
        key: value
        for key, value in state_dict.items()
        if "" in names or key in names or (below and key.startswith(below))
    }


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """A mapping seen from a submodule: names without the submodule's prefix."""

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the tensor of a name below the prefix."""
        return self.dataset[self.prefix + key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the whole names that start with the prefix."""
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        """Count all names of the underlying mapping."""
        return len(self.dataset)


class _Maps(dict[str, MappedFile]):
    """The files that a model has mapped, by path; copies and pickles begin without."""

    def __reduce__(self) -> tuple[type["_Maps"], tuple[()]]:
        """Leave the files out."""
        return _Maps, ()


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """A state dict whose tensors are in memory, in an offload folder, or in weights files used in place.

    Args:
        state_dict: Tensors that are in memory.
        save_folder: An offload folder; its `index.json` is read unless `index` is passed.
        index: Entries by weight name: `dtype` and `shape` of a `.dat` file in `save_folder`, or `safetensors_file`
            or `gguf_file`, `weight_name` and, when the weight is cast on loading, `dtype`.
        device: Where weights of safetensors files are put when read; by default the CPU, without a copy.

    Raises:
        ConfigurationError: When none of the first three is given.

    Examples:
        >>> offload_state_dict("store", model.state_dict())
        >>> weights = OffloadedWeightsLoader(save_folder="store")
        >>> weights["head.weight"].shape
        torch.Size([10, 64])
    """

    def __init__(
        self,
        state_dict: dict[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError(
                "Offloaded weights have to be somewhere; got neither tensors nor files. Need either a "
                "`state_dict`, a `save_folder` or an `index` containing offloaded weights."
            )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        # Weights are read when they are needed: by then the process may work in another folder.
        self._folder = None if save_folder is None else Path(os.path.abspath(save_folder))
        if index is None and self._folder is not None:
            index = {name: _resolved(one, self._folder) for name, one in _read_index(self._folder).items()}
        self.index = {} if index is None else index
        self.all_keys = [*self.state_dict, *(key for key in self.index if key not in self.state_dict)]
        self.device = device
        self._files: dict[str, tuple[MappedFile, str]] = {}
        # Of its own: what a forward writes to a weight in place is in the map, and no other model shall see that.
        self._maps = _Maps()

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return a weight: from memory, or as a view of its file's map.

        Raises:
            KeyError: When the weight is unknown.
            OffloadError: When its file changed since it was first read.
        """
        tensor = self.stored(key)
        if key in self.state_dict:
            return tensor
        wanted = self.dtype_of(key)
        if wanted is not None and wanted != tensor.dtype:
            tensor = tensor.to(wanted)
        return tensor if self.device is None else tensor.to(self.device)

    def __contains__(self, key: object) -> bool:
        """Return whether there is a weight of that name."""
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all weights."""
        return iter(self.all_keys)

    def __len__(self) -> int:
        """Count the weights."""
        return len(self.all_keys)

    def stored(self, key: str) -> torch.Tensor:
        """Return a weight as it is stored: not cast, not moved.

        Args:
            key: The weight's name.

        Returns:
            The tensor in memory, or a view of its file's map; the same object each time.

        Raises:
            KeyError: When the weight is unknown.
            OffloadError: When its file changed since it was first read.
        """
        tensor = self.state_dict.get(key)
        if tensor is not None:
            return tensor
        found = self._files.get(key) or self.file_of(key)
        if found is None:
            raise KeyError(key)
        found[0].check()
        return found[0].tensor(found[1])

    def file_of(self, key: str) -> tuple[MappedFile, str] | None:
        """Return where on disk a weight is.

        Args:
            key: The weight's name.

        Returns:
            The mapped file and the weight's name in it; None for weights in memory or unknown ones.
        """
        if key in self.state_dict:  # what was written to a weight's copy is in memory from then on
            return None
        found = self._files.get(key)
        if found is not None:
            return found
        entry = self.index.get(key)
        if entry is None:
            return None
        path = next((entry[key] for key in _IN_PLACE if entry.get(key) is not None), None)
        if path is not None:
            if path not in self._maps:
                self._maps[path] = MappedFile(path)
            found = self._maps[path], entry.get("weight_name", key)
            if found[1] not in found[0]:
                raise OffloadError(
                    f"A weights file does not hold an offloaded weight; got {found[1]!r} in "
                    f"{found[0].path!r}. Load and dispatch the model again."
                )
        elif entry.get("dat_file") is not None:
            found = _map_weight(entry["dat_file"], entry), ""
        else:
            if self._folder is None:
                raise OffloadError(
                    f"An offloaded weight has no folder; got the entry of {key!r} in the index, and no "
                    "`save_folder`. Pass the folder that its `.dat` file is in."
                )
            found = _map_weight(_data_file(self._folder, key), entry), ""
        found[0].check_stamp(entry.get("stamp"))
        self._files[key] = found
        return found

    def map_files(self, names: Iterable[str]) -> None:
        """Map the files of weights now: a file that takes the place of one later holds other weights.

        Args:
            names: The weights' names.
        """
        for name in names:
            self.file_of(name)

    def dtype_of(self, key: str) -> torch.dtype | None:
        """Return which dtype a weight on disk is cast to when loaded.

        Args:
            key: The weight's name.

        Returns:
            The dtype; None when its index names none.
        """
        name = self.index.get(key, {}).get("dtype")
        found = as_dtype(name)
        assert found is None or isinstance(found, torch.dtype)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave the maps out of copies and pickles: they are opened again on first use."""
        return {**self.__dict__, "_files": {}}


def offload_once(
    folder: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor], needed: Collection[str]
) -> None:
    """Write weights to an offload folder, or check that the folder already holds these weights."""
    if not os.path.isfile(os.path.join(folder, INDEX_NAME)):
        offload_state_dict(folder, state_dict)
        return
    stored = OffloadedWeightsLoader(save_folder=folder)
    missing = [name for name in state_dict if name in needed and name not in stored]
    if missing:
        raise OffloadError(
            f"The offload folder belongs to another model; got {os.fspath(folder)!r} without {', '.join(missing)}. "
            "Choose another folder, or delete this one."
        )
    # The weights themselves are compared, bit by bit, with what loading them would give: names, shapes and dtypes of
    # two models, or of one before and after training, may well be equal.
    for name, tensor in state_dict.items():
        if name in needed and not tensor.is_meta and not _holds(stored, name, tensor):
            raise OffloadError(
                f"The offload folder holds other weights than the model; got {os.fspath(folder)!r}, where {name!r} "
                "differs. Choose another folder or delete this one; to use the weights in it, build the model under "
                "`init_empty_weights`."
            )


def _holds(stored: OffloadedWeightsLoader, name: str, tensor: torch.Tensor) -> bool:
    """Return whether a folder's weight, as it would be loaded, is a tensor bit for bit."""
    equal = not differ(tensor, stored[name])
    place = stored.file_of(name)
    if place is not None:
        place[0].done_with(place[1])  # so that a large model is not in memory twice
    return equal


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ in any bit, once they are of one dtype."""
    if one.shape != other.shape:
        return True
    first = one.detach().to("cpu").contiguous()
    second = other.detach().to(device="cpu", dtype=one.dtype).contiguous()
    return not torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))
