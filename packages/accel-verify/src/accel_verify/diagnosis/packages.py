"""Python, the packages of accel, and whether what they need is installed in a version that fits."""

import platform
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

from accel_verify.diagnosis.finding import DoctorFinding, ok, problem, warning

_TOPIC = "Python and packages"
_ENGINES = ("accel-deepspeed", "accel-megatron", "accel-torchft")
"""Packages that a run may do without."""
_OURS = (
    *("accel-core", "accel-launch", "accel-parallel", "accel-bigmodel", "accel-plan", "accel-trackers", "accel-quant"),
    *(*_ENGINES, "accel-verify", "accel-all"),
)
_DROP_IN = "accelerate"
_WITHOUT_EXTRA = ("torchao", "transformer_engine", "transformers")
"""Libraries that accel uses if they are installed, and that none of its packages has as an extra."""


def check_packages() -> list[DoctorFinding]:
    """Examine Python and the packages of accel."""
    findings = [ok(_TOPIC, f"Python {platform.python_version()} in {sys.prefix}")]
    for ours in _installed_ours():
        name, misfits = ours.metadata["Name"], _misfits(ours)
        findings += misfits or [ok(_TOPIC, f"{name} {ours.version}, and what it needs")]
    return findings


def _installed_ours() -> list[Distribution]:
    """Return the distributions of accel, and the drop-in where `accelerate` is ours."""
    found = [each for name in _OURS if (each := _installed(name)) is not None]
    drop_in = _installed(_DROP_IN)
    if drop_in is not None and any(Requirement(text).name == "accel-all" for text in drop_in.requires or ()):
        found.append(drop_in)
    return found


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _misfits(ours: Distribution) -> list[DoctorFinding]:
    """Return a finding for each requirement of a package that is not met."""
    findings = []
    for requirement, extra in _requirements(ours):
        there, who = _installed(requirement.name), ours.metadata["Name"]
        kind = warning if extra or who in _ENGINES else problem
        wanted = f"{requirement.name}{requirement.specifier}"
        remedy = f"Run `pip install '{wanted}'`."
        if there is None:
            if not extra:
                findings.append(kind(_TOPIC, f"{who} needs {wanted}; it is not installed", remedy))
        elif not requirement.specifier.contains(there.version, prereleases=True):
            message = f"{who}{f'[{extra}]' if extra else ''} needs {wanted}; got {there.version}"
            findings.append(kind(_TOPIC, message, remedy))
    return findings


def _requirements(ours: Distribution) -> list[tuple[Requirement, str]]:
    """Return what a package needs here, each with the extra that asks for it; "" for what it always needs."""
    found = []
    for text in ours.requires or ():
        requirement = Requirement(text)
        extra = re.search(r"""extra == ['"]([\w-]+)['"]""", text)
        name = extra[1] if extra else ""
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": name})
        if applies:
            found.append((requirement, name))
    return found


def optional_libraries() -> list[str]:
    """Return the names of the installed optional distributions that accel uses."""
    extras = {requirement.name for ours in _installed_ours() for requirement, extra in _requirements(ours) if extra}
    return sorted(name for name in {*extras, *_WITHOUT_EXTRA} if _installed(name) is not None)


def module_of(name: str) -> str:
    """Return the module that an installed distribution is imported as."""
    found, likely = distribution(name), name.replace("-", "_").lower()
    listed = (found.read_text("top_level.txt") or "").split()
    modules = listed or [file.parts[0] for file in found.files or () if file.parts[1:] == ("__init__.py",)]
    shown = [module for module in modules if not module.startswith("_")]
    return next((module for module in shown if module.lower() == likely), next(iter(shown), likely))
