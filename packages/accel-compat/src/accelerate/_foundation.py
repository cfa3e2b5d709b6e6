"""The packages that these modules stand on, and the versions they must have."""

from importlib import metadata

from packaging.specifiers import SpecifierSet

from accelerate._version import __version__

__all__ = ["check"]

REQUIRED = {
    "accel-core": ">=0.1,<0.2",
    "accel-bigmodel": ">=0.1,<0.2",
    "accel-launch": ">=0.1,<0.2",
    "accel-trackers": ">=0.1,<0.2",
    "accel-quant": ">=0.1,<0.2",
    "accel-all": ">=0.1,<0.2",
}


def check() -> None:
    """Refuse to import over packages of other versions.

    Raises:
        ImportError: A package is missing, or its version is outside the range.
    """
    wrong = [found for name, versions in REQUIRED.items() if (found := _problem(name, versions)) is not None]
    if wrong:
        wanted = " ".join(f"'{name}{versions}'" for name, versions in REQUIRED.items())
        raise ImportError(
            f"accelerate {__version__} cannot stand on the packages that are installed; got {', '.join(wrong)}. "
            f"Install {wanted} together, in one pip command."
        )


def _problem(name: str, versions: str) -> str | None:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"no {name} (needs {versions})"
    if not SpecifierSet(versions).contains(found, prereleases=True):
        return f"{name} {found} (needs {versions})"
    return None
