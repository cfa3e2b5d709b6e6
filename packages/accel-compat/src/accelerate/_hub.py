"""What is asked of the hub about a model, and of an error that a library raised about one."""

from __future__ import annotations

from typing import Any

from accel_core.errors import MissingDependencyError
from accel_core.host.availability import is_timm_available, is_transformers_available


def check_has_model(error: Exception) -> str:
    """Return which library said that it does not know a model, "timm" or "transformers"; "unknown" for other errors."""
    text = str(error)
    # timm has no class for this error.
    if is_timm_available() and isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    # Nor has transformers.
    if is_transformers_available() and isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the hub knows of a model; "gated" when access has to be granted, "repo" where there is none.

    Raises:
        MissingDependencyError: When huggingface_hub is not installed.
    """
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as failure:
        raise MissingDependencyError(
            "Models on the hub are looked up with huggingface_hub, which is not installed. Install it, or name a local "
            "checkpoint."
        ) from failure
    try:
        return huggingface_hub.model_info(repo, token=token)
    except GatedRepoError:
        return "gated"
    except RepositoryNotFoundError:
        return "repo"
