"""The packages that these modules stand on, and the versions they must have: those that the distributions declare."""

import re
from importlib import metadata

from packaging.version import Version

from accelerate._version import __version__

_DECLARED = ("accelerate", "accel-all")  # whose bounds hold for siblings
_NAME = re.compile(r"accel-\w+")
_BOUND = re.compile(r"(>=|<)([\w.]+)")


def check() -> None:
    """Refuse to import over packages of other versions.

    Raises:
        ImportError: A package is missing, or its version is outside the range.
    """
    ranges = _ranges()
    wrong = [found for name, bounds in ranges.items() if (found := _problem(name, bounds)) is not None]
    if wrong:
        wanted = " ".join(f"'{name}{_text(bounds)}'" for name, bounds in ranges.items())
        raise ImportError(
            f"accelerate {__version__} cannot stand on the packages that are installed; got {', '.join(wrong)}. "
            f"Install {wanted} together, in one pip command."
        )


def _ranges() -> dict[str, dict[str, str]]:
    """Return the bounds of every sibling that this distribution, or the one that gathers all, declares."""
    found: dict[str, dict[str, str]] = {}
    for distribution in _DECLARED:
        try:
            declared = _field(distribution, "Requires-Dist")
        except metadata.PackageNotFoundError:
            found.setdefault(distribution, {})  # is looked for below, and named as missing
            continue
        for requirement in declared:
            name = _NAME.match(requirement)
            if name is not None and ";" not in requirement:  # one of an extra may be absent
                found[name[0]] = dict(sorted(_BOUND.findall(requirement), reverse=True))
    return found


def _field(distribution: str, name: str) -> list[str]:
    """Return the values of a field of a distribution's metadata."""
    # What `importlib.metadata` has for it parses the whole description as an e-mail, and this is a part of every
    # import.
    found = metadata.distribution(distribution)
    head, _, _ = (found.read_text("METADATA") or found.read_text("PKG-INFO") or "").partition("\n\n")
    return re.findall(rf"^{name}: (.*)$", head, re.MULTILINE)


def _text(bounds: dict[str, str]) -> str:
    return ",".join(f"{comparison}{version}" for comparison, version in bounds.items())


def _problem(name: str, bounds: dict[str, str]) -> str | None:
    try:
        (found,) = _field(name, "Version")
    except metadata.PackageNotFoundError:
        return f"no {name} (needs {_text(bounds) or 'any version'})"
    version = Version(Version(found).base_version)  # a build on the way to a release counts as that release
    if version < Version(bounds.get(">=", "0")) or ("<" in bounds and version >= Version(bounds["<"])):
        return f"{name} {found} (needs {_text(bounds)})"
    return None
