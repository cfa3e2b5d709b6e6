"""Arguments of `prepare` that are probably mistakes, and still can be meant: one warning each, on the main process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from accel_core.logging import get_logger
from accel_core.modules.compilation import is_compiled_module
from accel_core.optim.rebind import ParameterNames
from accel_core.state.gradient import GradientState
from accel_core.strategies.bundle import Bundle, kind_of

__all__ = [
    "models_of", "warn_of_bypassed", "warn_of_no_model", "warn_of_open_window", "warn_of_strange", "warn_of_unprepared",
]  # fmt: skip

logger = get_logger(__name__)


def warn_of_unprepared(given: object) -> None:
    """Warn of an object that `prepare` gives back as it is, although it is one, or holds some, that it prepares."""
    if isinstance(given, type):
        if issubclass(given, Module | Optimizer | DataLoader):
            _warn(f"the class {given.__name__}", f"Pass an instance, {given.__name__}(...).")
    elif isinstance(given, list | tuple | Mapping):
        items = given.values() if isinstance(given, Mapping) else given
        held = [type(item).__name__ for item in items if kind_of(item)]
        if held:
            advice = "prepare(*objects)" if items is given else "prepare(*objects.values())"
            _warn(f"a {type(given).__name__} with {', '.join(held)}", f"Pass each as an argument of its own: {advice}.")
    elif isinstance(given, Dataset) or type(given).__module__.partition(".")[0] == "datasets":
        _warn(f"the dataset {type(given).__name__}", "Pass a loader for it: DataLoader(dataset, batch_size=...).")


def _warn(found: str, advice: str) -> None:
    logger.warning(
        "prepare() prepares models, optimizers, loaders and schedules; got %s, which comes back as it is. %s",
        *(found, advice),
    )


def models_of(given: tuple[object, ...]) -> tuple[Module, ...]:
    """Return the models that `accumulate` was given, with one warning of what else is among them."""
    for each in given:
        if not isinstance(each, Module):
            advice = "accumulate(*models)" if isinstance(each, list | tuple) else "accumulate(model)"
            logger.warning_once(
                f"accumulate() takes models; got an object of type {type(each).__name__}, which is left "
                f"out. Pass what prepare() returned for the models: {advice}."
            )
    return tuple(each for each in given if isinstance(each, Module))


def warn_of_open_window(state: GradientState) -> None:
    """Warn of a save inside of an accumulation window."""
    if not state.sync_gradients:
        logger.warning_once(
            "A checkpoint has no gradients; got save_state inside of an accumulation window, whose batches so far will "
            "be missing in the first step of a run that goes on from it. Save where sync_gradients is true."
        )


def warn_of_no_model(ranks: int) -> None:
    """Warn of ranks that compute gradients and prepared no model: nobody averages them."""
    logger.warning_once(
        f"Ranks train together through prepared models; got none on {ranks} ranks: nothing averages their gradients. "
        "Pass the model to prepare(), with its optimizer and loader."
    )


def warn_of_bypassed(models: Sequence[Module]) -> None:
    """Warn of a loss that no prepared model computed: the script goes on with what it passed to `prepare`."""
    wrapped = [each for each in models if isinstance(each, DistributedDataParallel)]
    traced = any(is_compiled_module(each) or getattr(each, "_compiled_call_impl", None) for each in models)
    # torch's own mark of a first forward pass, which it does not set in one that it compiles
    if wrapped and not traced and not any(getattr(each, "_lazy_init_ran", True) for each in wrapped):
        logger.warning(
            "backward() got a loss that no prepared model computed, so ranks do not average its gradients. Use what "
            "prepare() returns: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)."
        )


def warn_of_strange(bundle: Bundle, names: ParameterNames) -> None:
    """Warn of optimizers that train none of the models passed with them, if a model has no other optimizer."""
    own = {id(each): slot for slot in bundle.models for each in slot.given.parameters() if each.requires_grad}
    trained, strange = set(), []
    for slot in bundle.optimizers:
        held = [each for group in slot.given.param_groups for each in group["params"]]
        trained |= {id(own[id(each)]) for each in held if id(each) in own}
        if held and own.keys().isdisjoint(map(id, held)) and len(names.strange(slot.given)) == len(held):
            strange.append(type(slot.given).__name__)
    idle = {type(slot.given).__name__ for slot in own.values() if id(slot) not in trained}
    if strange and idle:
        logger.warning(
            "An optimizer trains the parameters that it was made from; got %s without one of %s, which stays as it "
            "is. Make the optimizer from model.parameters() of the model that you pass to prepare().",
            *(", ".join(strange), ", ".join(sorted(idle))),
        )
