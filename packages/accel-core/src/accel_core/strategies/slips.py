"""Training whose gradients no rank averages: one warning, on the main process."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from accel_core._torch import compiles_itself
from accel_core.logging import get_logger
from accel_core.modules.compilation import is_compiled_module

logger = get_logger(__name__)


def warn_of_no_model(ranks: int) -> None:
    """Warn of ranks that compute gradients and prepared no model: nobody averages them."""
    logger.warning_once(
        f"Ranks train together through prepared models; got none on {ranks} ranks: nothing averages their gradients. "
        "Pass the model to prepare(), with its optimizer and loader."
    )


def warn_of_bypassed(models: Sequence[Module]) -> None:
    """Warn of a loss that no prepared model computed: the script goes on with what it passed to `prepare`."""
    wrapped = [each for each in models if isinstance(each, DistributedDataParallel)]
    traced = any(is_compiled_module(each) or compiles_itself(each) for each in models)
    # torch's own mark of a first forward pass, which it does not set in one that it compiles
    if wrapped and not traced and not any(getattr(each, "_lazy_init_ran", True) for each in wrapped):
        logger.warning(
            "backward() got a loss that no prepared model computed, so ranks do not average its gradients. Use what "
            "prepare() returns: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)."
        )
