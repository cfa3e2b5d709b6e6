"""Bump one package: its version file, its changelog, and the ranges of the packages that stand on it.

    python .ci/release.py PACKAGE VERSION|major|minor|patch [--root FOLDER]

A package's version moves only when that package changes. So this touches the version of the named package alone; a
dependant whose range does not hold the new version gets a wider one and a line in its changelog, to be released later.
Nothing is written unless everything can be.
"""

import argparse
import datetime
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

UNRELEASED = "## Unreleased"
VERSION = re.compile(r'^__version__ = "(?P<upstream>[^"+]*\+accel\.)?(?P<own>[^"]+)"$', re.MULTILINE)


class ReleaseError(Exception):
    """A release that cannot be made as asked; nothing was written."""


@dataclass(frozen=True)
class Sources:
    """The files of one package that a release reads and writes."""

    folder: Path

    @property
    def pyproject(self) -> Path:
        """The metadata."""
        return self.folder / "pyproject.toml"

    @property
    def changelog(self) -> Path:
        """The list of changes, newest first."""
        return self.folder / "CHANGELOG.md"

    @property
    def version_file(self) -> Path:
        """The one file that holds the version."""
        return next((self.folder / "src").glob("*/_version.py"))

    @property
    def name(self) -> str:
        """The distribution's name."""
        found = re.search(r'^name = "([^"]+)"$', self.pyproject.read_text(), re.MULTILINE)
        if found is None:
            raise ReleaseError(f'{self.pyproject} names no distribution. Give it a line `name = "…"`.')
        return found[1]

    @property
    def version(self) -> Version:
        """The version that the package has now; for the drop-in, its own part after `+accel.`."""
        found = VERSION.search(self.version_file.read_text())
        if found is None:
            raise ReleaseError(f'{self.version_file} holds no line `__version__ = "…"`. Add it.')
        return Version(found["own"])


def packages(root: Path) -> dict[str, Sources]:
    """Return the packages of the repository by their distribution's name."""
    found = (Sources(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml")))
    return {sources.name: sources for sources in found}


def next_version(now: Version, wanted: str, *, first: bool = False) -> Version:
    """Return the version that `major`, `minor`, `patch` or a written version means; a first release may keep its own.

    Raises:
        ReleaseError: It is not a version, or not above the present one.
    """
    major, minor, patch = now.release[0], *(*now.release[1:], 0, 0)[:2]
    steps = {"major": f"{major + 1}.0.0", "minor": f"{major}.{minor + 1}.0", "patch": f"{major}.{minor}.{patch + 1}"}
    try:
        version = Version(steps.get(wanted, wanted))
    except InvalidVersion:
        raise ReleaseError(f"{wanted!r} is not a version. Write one such as 0.2.0, or major, minor or patch.") from None
    if version < now or (version == now and not first):
        raise ReleaseError(f"{version} is not above the present version, {now}. Choose a higher one.")
    return version


def released(changelog: str, version: Version, day: datetime.date, where: Path) -> str:
    """Put what stands under "Unreleased" under the version and its day.

    Raises:
        ReleaseError: Nothing stands there: a package is released when it changed.
    """
    before, heading, after = changelog.partition(UNRELEASED)
    entries, following, older = after.partition("\n## ")
    if not heading or not entries.strip():
        raise ReleaseError(
            f"{where} has nothing under '{UNRELEASED}', and a package is released when it changed. Say there what did."
        )
    return f"{before}## {version} – {day.isoformat()}\n\n{entries.strip()}\n{following}{older}"


def noted(changelog: str, entry: str) -> str:
    """Add an entry under "Unreleased", which is made when it is not there."""
    if UNRELEASED in changelog:
        before, heading, after = changelog.partition(UNRELEASED)
        gap = "\n" if re.match(r"\s*-", after) else "\n\n"
        return f"{before}{heading}\n\n- {entry}{gap}{after.lstrip()}"
    title, _, rest = changelog.partition("\n")
    return f"{title}\n\n{UNRELEASED}\n\n- {entry}\n\n{rest.lstrip()}"


def widened(requirement: Requirement, version: Version) -> str:
    """Return the range with the same floor that also holds the version, up to its next breaking one."""
    ceiling = f"{version.major}.{version.minor + 1}" if version.major == 0 else f"{version.major + 1}"
    floors = [bound for bound in requirement.specifier if bound.operator in (">=", ">", "~=")]
    floor = f">={floors[0].version}" if floors else f">={version}"
    return f"{requirement.name}{floor},<{ceiling}"


def plan(root: Path, name: str, wanted: str, day: datetime.date) -> dict[Path, str]:
    """Return the new text of every file that the release changes.

    Raises:
        ReleaseError: The package is unknown, the version is not above the present one, or nothing changed.
    """
    known = packages(root)
    if name not in known:
        raise ReleaseError(f"There is no package {name!r}. Choose one of {', '.join(sorted(known))}.")
    own = known[name]
    changelog = own.changelog.read_text()
    version = next_version(own.version, wanted, first=re.search(r"^## \d", changelog, re.MULTILINE) is None)
    written = VERSION.sub(lambda old: f'__version__ = "{old["upstream"] or ""}{version}"', own.version_file.read_text())
    changes = {
        own.version_file: written,
        own.changelog: released(changelog, version, day, own.changelog),
    }
    for other in known.values():
        text = other.pyproject.read_text()
        for quoted in re.findall(r'"([^"\n]+)"', text):
            if not re.match(rf"{re.escape(name)}\s*(\[|[<>=!~]|$)", quoted) or quoted == name:
                continue
            requirement = Requirement(quoted)
            if requirement.specifier.contains(version, prereleases=True):
                continue
            wider = widened(requirement, version)
            text = text.replace(f'"{quoted}"', f'"{wider}"')
            entry = f"Works with {name} {version}: the range is now `{wider}`."
            changes[other.changelog] = noted(other.changelog.read_text(), entry)
        if text != other.pyproject.read_text():
            changes[other.pyproject] = text
    return changes


def main() -> int:
    """Release the package that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("version", help="a version, or major, minor or patch")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    try:
        changes = plan(args.root, args.package, args.version, datetime.date.today())
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 2
    for path, text in changes.items():
        path.write_text(text)
        print(path.relative_to(args.root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
