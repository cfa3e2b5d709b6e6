"""Prove, where all packages are installed, that one comes alone and whole: `alone.py SOURCE REQUIREMENTS STRANGER…`.

None of the strangers can be imported, the wheel brought every file that lies in the package's source, and each of its
modules imports with what the requirements (with commas between) bring: all else that is installed is hidden. One may
lack a stranger that one of the package's extras brings.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def hide(requirements: Iterable[Requirement], folder: Path) -> None:
    """Let Python find only what requirements bring: modules, metadata and entry points, by links in an empty folder."""
    needed = needs(requirements)
    owners = packages_distributions()
    for number, place in enumerate(sys.path):
        if not os.path.isdir(place) or not any(name.endswith(".dist-info") for name in os.listdir(place)):
            continue
        sys.path[number] = str(folder / str(number))
        os.mkdir(sys.path[number])
        for name in os.listdir(place):
            if name.endswith(".dist-info"):
                kept = canonicalize_name(name.partition("-")[0]) in needed
            else:
                found = owners.get(name.partition(".")[0])
                kept = found is None or not needed.isdisjoint(map(canonicalize_name, found))
            if kept:
                os.symlink(os.path.join(place, name), os.path.join(sys.path[number], name))
    importlib.invalidate_caches()


def needs(requirements: Iterable[Requirement]) -> set[str]:
    """Return the names of the distributions that requirements bring: their own, and what these declare in turn."""
    found: dict[str, set[str]] = {}
    waiting = [*requirements]
    for one in waiting:
        name = canonicalize_name(one.name)
        if name in found and one.extras <= found[name]:
            continue
        found.setdefault(name, set()).update(one.extras)
        with contextlib.suppress(PackageNotFoundError):  # of an extra: a module that wants it will not import
            waiting.extend(declared(distribution(name), one.extras))
    return set(found)


def declared(found: Distribution, extras: set[str]) -> Iterator[Requirement]:
    """Return what a distribution requires here, with some of its extras."""
    for text in found.requires or ():
        other = Requirement(text)
        if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield other


def of_extras(own: str) -> set[str]:
    """Return the modules of the siblings that a package declares as extras."""
    texts = [text for name in {*packages_distributions()[own]} for text in distribution(name).requires or ()]
    return {canonicalize_name(Requirement(text).name).replace("-", "_") for text in texts if "extra ==" in text}


def bring(name: str, extra: set[str]) -> None:
    """Import a module, which may lack one of an extra."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in extra:
            raise


def main(source: Path, strangers: list[str]) -> int:
    """Check the package whose source this is, and return an exit status."""
    own = source.name
    found = [name for name in strangers if importlib.util.find_spec(name)]
    if found:
        sys.exit(f"{own} was installed alone, yet these can be imported: {', '.join(found)}")
    package = importlib.import_module(own)
    installed = Path(str(package.__file__)).parent
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    files = [path for path in files if path.suffix not in (".pyc", ".so")]  # made where the tree is used in place
    lost = [str(path) for path in files if not (installed / path).is_file()]
    if lost:
        sys.exit(f"the wheel of {own} lacks files that lie in {source}: {', '.join(lost)}")
    modules = [path.with_suffix("").parts for path in files if path.suffix == ".py"]
    names = [".".join((own, *(part for part in parts if part != "__init__"))) for parts in modules]
    extra = set(strangers) & of_extras(own)
    for name in names:
        if not name.endswith(".__main__"):  # runs a program
            bring(name, extra)
    loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(strangers))
    if loaded:
        sys.exit(f"importing {own} loaded {', '.join(loaded)}")
    print(f"{own}: {len(names)} modules import; not importable: {', '.join(strangers) or 'nothing is left out'}")
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as view:
        hide(map(Requirement, sys.argv[2].split(",")), Path(view))
        sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
