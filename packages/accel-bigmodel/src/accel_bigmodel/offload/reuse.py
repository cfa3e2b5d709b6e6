"""An offload folder written once, and used again only for the weights that it holds."""

import os
from collections.abc import Collection, Mapping

import torch

from accel_bigmodel.offload.store import INDEX_NAME, OffloadedWeightsLoader, offload_state_dict
from accel_core.errors import OffloadError

__all__ = ["offload_once"]


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
    weight = stored[name]
    if weight.shape != tensor.shape:
        return False
    ours, theirs = tensor.detach().to("cpu").contiguous(), weight.to(tensor.dtype)
    equal = torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))
    place = stored.file_of(name)
    if place is not None:
        place[0].done_with(place[1])  # so that a large model is not in memory twice
    return equal
