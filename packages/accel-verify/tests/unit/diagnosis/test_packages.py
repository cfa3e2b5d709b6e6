"""Packages of accel: what they need, in the versions that are installed."""

from pathlib import Path

import pytest

from accel_verify.diagnosis.finding import DoctorFinding
from accel_verify.diagnosis.packages import check_packages, module_of, optional_libraries


def install(folder: Path, name: str, version: str, *needs: str, python: str = ">=3.10") -> None:
    """Put a distribution into a folder of the path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs)]) + "\n")


def of(findings: list[DoctorFinding], name: str) -> list[tuple[str, str, str]]:
    """Return the findings that begin with the name of a package."""
    return [finding[1:] for finding in findings if finding.what.startswith(f"{name} ")]


@pytest.mark.parametrize(
    ("needs", "state", "message", "remedy"),
    [
        ("accel-core>=9", "problem", "needs accel-core>=9; got ", "Run `pip install 'accel-core>=9'`."),
        (
            "not-here-at-all",
            "problem",
            "needs not-here-at-all; it is not installed",
            "`pip install 'not-here-at-all'`.",
        ),
        ("pytest>=999; extra == 'plots'", "warning", "accel-quant[plots] needs pytest>=999; got ", "'pytest>=999'"),
        ("not-here-at-all; extra == 'plots'", "ok", "and what it needs", ""),
    ],
)
def test_requirements_are_compared_with_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: str, state: str, message: str, remedy: str
) -> None:
    """A requirement that is not met is a problem; one of an extra is a warning, and none where it is not installed."""
    install(tmp_path, "accel-quant", "0.1.0", needs)
    monkeypatch.syspath_prepend(str(tmp_path))
    findings = check_packages()
    assert findings[0].what.startswith("Python 3.")
    [found] = [each for each in findings if each.what.startswith("accel-quant")]
    assert found.state == state
    assert message in found.what
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("accel-parallel", "problem"),
        ("accel-deepspeed", "warning"),
        ("accel-megatron", "warning"),
        ("accel-torchft", "warning"),
    ],
)
def test_packages_of_engines_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wanted: str
) -> None:
    """One that needs another accel-core is told: a problem, or a warning where a run may do without that engine."""
    install(tmp_path, name, "0.1.0", "accel-core>=9")
    monkeypatch.syspath_prepend(str(tmp_path))
    [(state, what, _)] = of(check_packages(), name)
    assert (state, what.partition(";")[0]) == (wanted, f"{name} needs accel-core>=9")


def test_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed libraries of extras are tried, under the name that they are imported as."""
    install(tmp_path, "accel-quant", "0.1.0", "PyYAML; extra == 'plots'", "not-here-at-all; extra == 'plots'")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = optional_libraries()
    assert "PyYAML" in found
    assert "not-here-at-all" not in found
    assert module_of("PyYAML") == "yaml"
    assert module_of("pytest") == "pytest"
