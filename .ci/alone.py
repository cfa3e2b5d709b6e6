"""Prove, in an environment that holds one package, that it came alone and whole: `alone.py SOURCE STRANGER…`.

None of the strangers can be imported, the wheel brought every file that lies in the package's source, and each of its
modules imports with what the package declares; or lacks a stranger that one of the package's extras brings.
"""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path


def of_extras(own: str) -> set[str]:
    """Return the modules of the siblings that a package declares as extras."""
    (distribution,) = importlib.metadata.packages_distributions()[own]
    requirements = importlib.metadata.requires(distribution) or []
    return {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in requirements if "extra ==" in text}


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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
