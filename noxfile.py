"""Sessions of the project: `nox --list` shows them, a bare `nox` runs what a change has to pass.

Every environment lies in `.nox/` and is made again only when what it is made from changed: the requirements, the
constraints, and the metadata of the packages it holds. torch is installed first, in the version of `constraints.txt`,
so that no other requirement can bring another build of it.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import nox
import nox.project
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.resolve()
WORKSHOP = ROOT / ".nox"
CONSTRAINTS = ROOT / "constraints.txt"
TORCH = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
TORCHES = ("2.8", "2.11", "2.13", "2.15")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "architecture", "tests", "integration"]
nox.options.error_on_external_run = False


@dataclass(frozen=True, eq=False)
class Package:
    """One distribution of the repository, as its pyproject.toml declares it."""

    folder: Path
    name: str
    module: str
    requires_python: str
    dependencies: tuple[str, ...]
    extras: dict[str, list[str]]
    groups: dict[str, list[str]]

    @classmethod
    def read(cls, pyproject: Path) -> Package:
        """Read a package's facts from its pyproject.toml."""
        data = nox.project.load_toml(pyproject)
        project = data["project"]
        module = Path(data["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"][0]).name
        groups = {name: list(nox.project.dependency_groups(data, name)) for name in data.get("dependency-groups", {})}
        dependencies, extras = tuple(project.get("dependencies", [])), project.get("optional-dependencies", {})
        return cls(pyproject.parent, project["name"], module, project["requires-python"], dependencies, extras, groups)

    @property
    def siblings(self) -> list[str]:
        """Names of the packages of this repository that this one stands on, itself first, each once."""
        return with_siblings([self.name])

    @property
    def tested_with(self) -> list[str]:
        """The same, and those that its tests name besides."""
        return with_siblings([self.name, *(Requirement(text).name for text in self.groups.get("test", []))])

    @property
    def third_party(self) -> list[str]:
        """Requirements of this package and of the siblings it stands on that come from an index."""
        texts = (text for name in self.siblings for text in PACKAGES[name].dependencies)
        return sorted({text for text in texts if Requirement(text).name not in PACKAGES})

    def digest(self) -> str:
        """Return a hash of all that goes into the package's wheel."""
        files = [*sorted((self.folder / "src").rglob("*")), *(self.folder / n for n in ("pyproject.toml", "README.md"))]
        return hashed(*(p for p in files if p.is_file() and p.suffix not in (".pyc", ".so")))


def with_siblings(names: list[str]) -> list[str]:
    """Return those of the names that are packages of this repository, and all that these stand on, each once."""
    found = [name for name in names if name in PACKAGES]
    for name in found:
        wanted = (Requirement(text).name for text in PACKAGES[name].dependencies)
        found.extend(other for other in wanted if other in PACKAGES and other not in found)
    return found


PACKAGES = {p.name: p for p in map(Package.read, sorted((ROOT / "packages").glob("*/pyproject.toml")))}
PACKAGES = dict(sorted(PACKAGES.items(), key=lambda item: len(item[1].siblings)))  # bottom up, as pip wants them
BARE = ["accel-deepspeed"]
"""Packages installed without the library they require, which others would load. `nox -s deepspeed` installs it."""

TOGETHER = [name for name in PACKAGES if name not in BARE]
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]


def hashed(*parts: object) -> str:
    """Return a hash of texts, and of the contents of the files among the parts."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.read_bytes() if isinstance(part, Path) else str(part).encode())
        total.update(b"\0")
    return total.hexdigest()


class Environment:
    """A virtual environment in `.nox/`, kept until what it is made from changes."""

    def __init__(self, session: nox.Session, name: str, python: str = sys.executable, torch: str = TORCH) -> None:
        self.session = session
        self.folder = WORKSHOP / name
        self.stamp = self.folder / "made-from.json"
        self.python = python
        self.torch = torch

    def run(self, program: str, *args: object, **options: object) -> object:
        """Run one of the environment's programs; its other programs are found by name too."""
        scripts = self.folder / "bin"
        env = {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "",  # where it is set, every process of a test would compile torch again
            **options.pop("env", {}),  # type: ignore[dict-item]
        }
        return self.session.run(str(scripts / program), *map(str, args), env=env, external=True, **options)

    def pip(self, *args: object) -> None:
        """Install with pip under the project's constraints; nothing is compiled to bytecode before it is used."""
        pip = (installer(self.session), "-m", "pip", "--python", self.folder / "bin" / "python", "install")
        options = ("-qq", "--no-compile", "--disable-pip-version-check")
        pinned = ("-c", CONSTRAINTS) if self.torch == TORCH else (self.torch,)
        self.session.run(*map(str, (*pip, *options, *pinned, *args)), external=True)

    def provide(
        self, requirements: list[str], packages: list[str], *, bare: Sequence[str] = (), wheels: bool = False
    ) -> Environment:
        """Install third-party requirements and packages of the repository, if that is not what is there already.

        Args:
            requirements: Third-party requirements, besides those that the packages declare.
            packages: Names of packages of this repository, with extras in brackets where wanted. All of them go into
                one pip command, so that none comes from an index; also those that the requirements name, without a
                version: `accelerate==1.15.0` is Hugging Face's.
            bare: Names of packages that are used in place without what they require.
            wheels: Install built wheels rather than the folders of the tree.
        """
        named = PACKAGES.keys() & requirements
        requirements = [text for text in requirements if text not in named]
        packages = [*packages, *sorted(named - {Requirement(text).name for text in (*packages, *bare)})]
        chosen = [PACKAGES[Requirement(text).name] for text in (*packages, *bare)]
        versions = [package.folder / "src" / package.module / "_version.py" for package in chosen]
        made_from = hashed(self.python, self.torch, sorted(requirements), packages, [*bare], wheels, CONSTRAINTS,
                           *(p.folder / "pyproject.toml" for p in chosen), *versions)  # fmt: skip
        contents = hashed(*(package.digest() for package in chosen)) if wheels else ""
        stamp = json.dumps({"made from": made_from, "contents": contents})
        before = json.loads(self.stamp.read_text()) if self.stamp.exists() else {}
        if before == json.loads(stamp):
            self.session.log(f"reusing {self.folder.relative_to(ROOT)}")
            return self
        if before.get("made from") == made_from:
            self.pip("--force-reinstall", "--no-deps", *targets(self.session, packages, wheels))
        else:
            self.clear()
            if packages or any(Requirement(text).name == "torch" for text in requirements):
                self.link_torch()
            self.pip(*requirements, *targets(self.session, packages, wheels))
            if bare:
                self.pip("--no-deps", *targets(self.session, [*bare], wheels=False))
        self.stamp.write_text(stamp)
        return self

    def clear(self) -> None:
        """Make the environment anew, with nothing installed: pip would be most of what that takes."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.session.run(self.python, "-m", "venv", "--without-pip", str(self.folder), external=True)

    @property
    def first(self) -> str:
        """Name of the environment that has nothing but this Python's torch."""
        usual = (self.python, self.torch) == (sys.executable, TORCH)
        return "torch" if usual else f"torch-{hashed(self.python, self.torch)[:8]}"

    def remove(self) -> None:
        """Delete the environment and its torch, unless the usual one: PyPI's builds take 5 GB with CUDA's libraries."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.first != "torch":
            shutil.rmtree(WORKSHOP / self.first, ignore_errors=True)

    def link_torch(self) -> None:
        """Put torch and its dependencies there as links to the files of one environment that has nothing else.

        Installing them and compiling what `import torch` loads takes longer than most packages' tests.
        """
        first = self.with_torch_alone()
        for entry in first.folder.glob("lib/python*/site-packages/*"):
            own = self.folder / entry.relative_to(first.folder)
            if entry.is_dir() and not own.exists():
                shutil.copytree(entry, own, copy_function=os.link)
            elif not own.exists():
                os.link(entry, own)

    def with_torch_alone(self) -> Environment:
        """Make the environment that has nothing but torch, compiled as far as `import torch` goes."""
        first = Environment(self.session, self.first, self.python, self.torch)
        made_from = hashed(self.torch, self.python, sys.version)
        if not first.stamp.exists() or first.stamp.read_text() != made_from:
            first.clear()
            first.pip(self.torch)
            first.run("python", "-W", "ignore", "-c", "import torch._dynamo, torch.distributed.fsdp")
            first.stamp.write_text(made_from)
        return first


def installer(session: nox.Session) -> Path:
    """Return the Python whose pip installs into all environments, which have none of their own."""
    folder = WORKSHOP / "pip"
    python = folder / "bin" / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "venv", str(folder), external=True)
        # Python brings a pip of its own age, which may know no --python and takes twice as long to choose versions.
        session.run(str(python), "-m", "pip", "install", "-qq", "--upgrade", "pip>=22.3", external=True)
    return python


def targets(session: nox.Session, packages: list[str], wheels: bool) -> list[str]:
    """Return what pip is given for each package: its folder to be used in place, or its wheel."""
    if wheels:
        return [str(built(session, PACKAGES[name])) for name in packages]
    arguments = []
    for text in packages:
        name, bracket, extras = text.partition("[")
        arguments += ["-e", f"{PACKAGES[name].folder}{bracket}{extras}"]
    return arguments


def built(session: nox.Session, package: Package) -> Path:
    """Return the package's wheel, built now unless this very tree has been built before."""
    folder = WORKSHOP / "wheels" / f"{package.name}-{package.digest()[:16]}"
    if not list(folder.glob("*.whl")):
        for old in folder.parent.glob(f"{package.name}-*"):
            shutil.rmtree(old)
        builder = Environment(session, "build").provide(GROUPS["build"], [])
        with session.chdir(package.folder):
            builder.run("hatchling", "build", "-t", "wheel", "-d", folder, silent=True)
    return next(folder.glob("*.whl"))


def tree(session: nox.Session) -> Environment:
    """Return the one environment that holds every package from the tree, all test requirements and the type checker."""
    wanted = {text for package in PACKAGES.values() for name in ("test", "test-full")
              for text in package.groups.get(name, [])}  # fmt: skip
    groups = ("types", "packaging", "examples")
    requirements = sorted(wanted | {text for name in groups for text in GROUPS[name]})
    return Environment(session, "tree").provide(requirements, TOGETHER, bare=BARE)


def peer(session: nox.Session) -> Environment:
    """Return an environment with accelerate 1.15.0 and none of our packages, to compare with.

    Tests and benchmarks find its interpreter in the environment variable ACCEL_PEER_PYTHON.
    """
    return Environment(session, "peer").provide([TORCH, "accelerate==1.15.0"], [])


def clients(session: nox.Session) -> Environment:
    """Return the environment of released libraries on the drop-in, without what only tests of the packages need."""
    groups = PACKAGES["accelerate"].groups
    return Environment(session, "interop").provide([*groups["interop"], *groups["test"]], TOGETHER, bare=BARE)


def with_deepspeed(session: nox.Session) -> Environment:
    """Return the environment of what runs on DeepSpeed: all packages, the libraries that train with it, the examples.

    DeepSpeed compiles its operators when they are first used, which takes minutes and a C++ compiler.
    """
    wanted = ("datasets", "peft", "transformers", "trl")
    libraries = [text for text in PACKAGES["accelerate"].groups["interop"] if Requirement(text).name in wanted]
    requirements = [*PACKAGES["accel-core"].groups["test"], *GROUPS["examples"], *libraries, "numpy", "tensorboard"]
    return Environment(session, "deepspeed").provide(requirements, list(PACKAGES))


def with_megatron(session: nox.Session) -> Environment:
    """Return the environment of what runs on megatron-core: its package, and the library whose models it is told of."""
    own = PACKAGES["accel-megatron"]
    return Environment(session, "megatron").provide(
        own.groups["test"], ["accel-core", "accel-testing", "accel-parallel", "accel-megatron[models]"]
    )


def chosen_packages(session: nox.Session) -> tuple[list[Package], list[str]]:
    """Split a session's arguments into the packages that are named (all, if none is) and the rest."""
    names = [word for word in session.posargs if word in PACKAGES]
    rest = [word for word in session.posargs if word not in PACKAGES]
    return [PACKAGES[name] for name in names or PACKAGES], rest


def pytest(
    environment: Environment, title: str, *args: object, env: dict[str, str] | None = None, **options: object
) -> None:
    """Run pytest with a cache of its own for each session, and show the slowest tests.

    torch has one thread in each process: the threads of several wait for one another longer than they compute.
    """
    kept = ("-o", f"cache_dir={WORKSHOP / 'pytest' / title}", "--durations", 10)
    environment.run("pytest", *args, *kept, env={"OMP_NUM_THREADS": "1", **(env or {})}, **options)


def spread(arguments: list[str], tier: str = "not full") -> list[str]:
    """Return pytest's arguments: those that were given, else such that run the first tier's tests in three processes.

    Many tests wait for processes that they start: three at a time keep two cores busy.
    """
    return arguments or ["-n", "3", "--dist", "worksteal", "-m", tier]


@nox.session(venv_backend="none")
def quickstart(session: nox.Session) -> None:
    """Train on two processes, save, resume, then run the model from CPU and disk: the main job on real digits."""
    packages = [name for name in TOGETHER if name != "accelerate"]
    packages[packages.index("accel-trackers")] += "[tensorboard]"
    main_job(session, Environment(session, "quickstart").provide(GROUPS["examples"], packages))


def main_job(session: nox.Session, environment: Environment) -> None:
    """Train on two processes, save, resume, then run the model from CPU and disk."""
    shutil.rmtree(ROOT / "runs" / "digits", ignore_errors=True)
    train = ("launch", "--cpu", "--num-processes", "2", "examples/train_digits.py")
    begun = time.monotonic()
    environment.run("accel", *train)
    environment.run("accel", *train, "--resume")
    environment.run("python", "examples/run_big_model.py")
    session.log(f"trained, resumed and run in {time.monotonic() - begun:.0f} seconds")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Test packages from the tree, all in one environment: `nox -s tests -- accel-core -k shard`."""
    packages, rest = chosen_packages(session)
    folders = [package.folder / "tests" for package in packages if (package.folder / "tests").is_dir()]
    pytest(tree(session), "tests", *folders, *spread(rest))


@nox.session(venv_backend="none", default=False)
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def isolated(session: nox.Session, package: str) -> None:
    """Test one package's wheel with nothing but what it and its tests declare; every module imports without the latter.

    Tests of several ranks and those marked `slow` are left to the session `tests`: what a package can import is the
    same on every rank and after any time. `nox -s "isolated(accel-core)" -- -n 3` runs them too.
    """
    own = PACKAGES[package]
    requirements = own.third_party + own.groups.get("test", [])
    environment = Environment(session, f"isolated-{package}").provide(requirements, own.tested_with, wheels=True)
    strangers = sorted(other.module for other in PACKAGES.values() if other.name not in own.siblings)
    proof = ("-I", ROOT / ".ci" / "alone.py", own.folder / "src" / own.module, ",".join(own.siblings), *strangers)
    environment.run("python", *proof)
    quick = [*spread([], "not slow and not full"), f"--ignore={own.folder / 'tests' / 'ranks'}"]
    pytest(environment, f"isolated-{package}", own.folder / "tests", *(session.posargs or quick))


INTEGRATION = ROOT / "tests-integration"


def together() -> list[Path]:
    """Return the folders and files of the tests that need all packages and nothing more."""
    elsewhere = ("architecture", "gallery", "interop", "__pycache__")
    everything = [path for path in sorted(INTEGRATION.iterdir()) if path.name not in elsewhere]
    beside = [INTEGRATION / "interop" / f"test_{name}.py" for name in ("checkpoint_exchange", "smoke")]
    return [*everything, *beside, INTEGRATION / "gallery" / "test_quick.py"]


def tools(session: nox.Session) -> dict[str, str]:
    """Return the variables by which tests find Accelerate and what builds packages."""
    builder = Environment(session, "build").provide(GROUPS["build"], [])
    return {
        "ACCEL_PEER_PYTHON": str(peer(session).folder / "bin" / "python"),
        "ACCEL_HATCH": str(builder.folder / "bin" / "hatch"),
    }


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """Test the packages together: packaging, equivalence, faults, typing, folders exchanged, a Trainer's smoke."""
    pytest(tree(session), "integration", *(session.posargs or [*together(), *spread([])]), env=tools(session))


@nox.session(venv_backend="none", default=False)
def second(session: nox.Session) -> None:
    """Run what is marked `full`, the tests of the second tier that need no environment of their own."""
    folders = [package.folder / "tests" for package in PACKAGES.values() if (package.folder / "tests").is_dir()]
    chosen = session.posargs or [*folders, *together(), *spread([], "full")]
    pytest(tree(session), "second", *chosen, env=tools(session))


SECOND = (
    *("second", *(f"isolated({name})" for name in PACKAGES), "quickstart", "gallery", "docs", "trackers"),
    *("stores", "interop", "deepspeed", "megatron", "floor"),
)
"""Sessions of the second tier, those first that take minutes."""


@nox.session(venv_backend="none", default=False)
def full(session: nox.Session) -> None:
    """Run both tiers: what a bare `nox` runs, and the rest, which takes hours."""
    for name in (*nox.options.sessions, *SECOND):
        session.notify(name, posargs=[])


@nox.session(venv_backend="none")
def deepspeed(session: nox.Session) -> None:
    """Test what runs on DeepSpeed, with the real library on the CPU; elsewhere these tests are skipped."""
    environment = with_deepspeed(session)
    own = PACKAGES["accel-deepspeed"].folder / "tests"
    together = [
        ("interop", "deepspeed"),
        ("interop", "ulysses"),
        ("interop", "deepspeed_memory"),
        ("newcomer", "deepspeed"),
    ]
    clients = [ROOT / "tests-integration" / folder / f"test_{name}.py" for folder, name in together]
    verified = PACKAGES["accel-verify"].folder / "tests" / "ranks" / "test_verify_parallel.py"
    shared = f"{verified}::test_sequences_that_ranks_share_are_equal_to_one_process"
    chosen = session.posargs or [*spread([])[:4], own, shared, *clients]  # both tiers
    pytest(environment, "deepspeed", *chosen, env={"DS_ACCELERATOR": "cpu"})


@nox.session(venv_backend="none", default=False)
def megatron(session: nox.Session) -> None:
    """Test every degree of the engine on megatron-core, with the real library on the CPU, in four minutes.

    The session `tests` has two of them.
    """
    own = PACKAGES["accel-megatron"].folder / "tests"
    pytest(with_megatron(session), "megatron", *(session.posargs or [own]))


@nox.session(venv_backend="none")
def architecture(session: nox.Session) -> None:
    """Check which way imports point, between the packages and inside them, and the other laws of the house."""
    environment = Environment(session, "architecture").provide(GROUPS["architecture"], [])
    sources = os.pathsep.join(str(package.folder / "src") for package in PACKAGES.values())
    environment.run("lint-imports", "--config", ROOT / "pyproject.toml", env={"PYTHONPATH": sources})
    pytest(environment, "architecture", ROOT / "tests-integration" / "architecture", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff, that the stubs fit, that every name is used, and the size of the house."""
    environment = Environment(session, "lint").provide(GROUPS["lint"], [])
    environment.run("ruff", "check", *(session.posargs or ["."]))
    environment.run("ruff", "format", "--check", *(session.posargs or ["."]))
    environment.run("python", ROOT / ".ci" / "stubs.py", "--check")
    environment.run("python", ROOT / ".ci" / "house.py")
    public = WORKSHOP / "public_names.py"  # names that count as used: Accelerate's interface, and what text names
    words = re.findall(r"[A-Za-z_]\w*", (PACKAGES["accelerate"].folder / "tests/surface/surface.json").read_text())
    sources = [package.folder / "src" for package in PACKAGES.values()]
    for path in (file for folder in sources for file in (*folder.rglob("*.py"), folder.parent / "pyproject.toml")):
        # Entry points, and names that are imported at first use.
        words += re.findall(r'"[\w.]+:(\w+)"', path.read_text())
    public.write_text("\n".join(word for word in words if not keyword.iskeyword(word)))
    read = (*sources, *(ROOT / name for name in ("tests-integration", "examples", "benchmarks", "docs")), public)
    listed = str(environment.run("vulture", *read, silent=True, success_codes=(0, 3)))
    unused = [line for line in listed.splitlines() if line.startswith("packages")]
    if unused:
        session.error("\n".join(["nothing uses these names:", *unused]))


@nox.session(venv_backend="none", default=False)
def stubs(session: nox.Session) -> None:
    """Write the stubs of packages whose names are imported when they are first used."""
    Environment(session, "lint").provide(GROUPS["lint"], []).run("python", ROOT / ".ci" / "stubs.py")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check types with mypy, strictly, package by package from the bottom up."""
    packages, rest = chosen_packages(session)
    folders = [package.folder / "src" / package.module for package in packages]
    tree(session).run("mypy", "--cache-dir", WORKSHOP / "mypy", "--num-workers", "2", *folders, *rest)


@nox.session(venv_backend="none", default=False)
def build(session: nox.Session) -> None:
    """Build wheels and sdists into `dist/`: of the packages that are named, or of all."""
    packages, rest = chosen_packages(session)
    environment = Environment(session, "build").provide(GROUPS["build"], [])
    for package in packages:
        with session.chdir(package.folder):
            environment.run("hatch", "build", ROOT / "dist", *rest)


@nox.session(venv_backend="none", default=False)
def floor(session: nox.Session) -> None:
    """Test with the lowest declared version of everything: Python (of those found here), torch, libraries, siblings."""
    packages, rest = chosen_packages(session)
    python = lowest_python()
    session.log(f"the lowest declared Python that is found here: {python}")
    for package in packages:
        texts = [*package.third_party, *package.extras.get("bitsandbytes", ())]
        pins = sorted(map(lowest_version, texts), key=lambda pin: Version(pin.partition("==")[2] or "0"))
        lowest = [*{Requirement(pin).name: pin for pin in pins}.values()]  # of two lower bounds, the higher one
        name = f"floor-{package.name}"
        environment = Environment(session, name, python, lowest_torch(package))
        environment.provide(lowest + package.groups.get("test", []), package.tested_with, wheels=True)
        pytest(environment, name, package.folder / "tests", *spread(rest))


def lowest_python() -> str:
    """Return the lowest Python from 3.10 upwards that is found on PATH and runs (a version manager's shim may not)."""
    found = (python_of(f"3.{minor}") for minor in range(10, sys.version_info.minor))
    return next(filter(None, found), sys.executable)


def python_of(version: str) -> str | None:
    """Return the Python of a version that is found on PATH and runs, if there is one."""
    program = shutil.which(f"python{version}")
    works = program and subprocess.run([program, "-c", "import venv"], capture_output=True, check=False).returncode == 0
    return program if works else None


def lowest_version(text: str) -> str:
    """Pin a requirement to its own lower bound: `rich>=13.0` becomes `rich==13.0`."""
    requirement = Requirement(text)
    bounds = [bound.version for bound in requirement.specifier if bound.operator in (">=", "~=")]
    return f"{requirement.name}=={bounds[0]}" if bounds else text


def lowest_torch(package: Package) -> str:
    """Return the lowest torch that a package and those it stands on declare, pinned."""
    pins = [lowest_version(text) for text in package.third_party if Requirement(text).name == "torch"]
    return max(pins, key=lambda pin: Version(pin.partition("==")[2]))


def takes(package: Package, torch: str) -> bool:
    """Return whether a package declares that it works with a torch, pinned as `torch==2.8.*`."""
    version = torch.partition("==")[2].removesuffix(".*")
    return all(
        Requirement(text).specifier.contains(version)
        for text in package.third_party
        if Requirement(text).name == "torch"
    )


@nox.session(venv_backend="none", default=False)
def torch(session: nox.Session) -> None:
    """Test all packages, and run the main job, with other versions of torch: `nox -s torch -- 2.8 2.15`."""
    versions = session.posargs or TORCHES
    pins = {version: f"torch=={version}" + (".*" if version.count(".") == 1 else "") for version in versions}
    compare(session, {f"torch {v}": Environment(session, f"torch-{v}", torch=pin) for v, pin in pins.items()})


@nox.session(venv_backend="none", default=False)
def python(session: nox.Session) -> None:
    """Test all packages, and run the main job, with other versions of Python, those found on PATH."""
    found = {version: python_of(version) for version in session.posargs or PYTHONS}
    for version in (version for version, program in found.items() if program is None):
        session.warn(f"python{version} is not on PATH, or does not run: not tested")
    chosen = {version: program for version, program in found.items() if program is not None}
    compare(session, {f"Python {v}": Environment(session, f"python-{v}", program) for v, program in chosen.items()})


def compare(session: nox.Session, environments: dict[str, Environment]) -> None:
    """Test every package in one environment after the other, each removed before the next is made; log a table."""
    wanted = {text for package in PACKAGES.values() for text in package.groups.get("test", [])}
    requirements = sorted(wanted | set(GROUPS["examples"]))
    rows, failed = [], []
    for title, environment in environments.items():
        try:
            fitting = [name for name in TOGETHER if takes(PACKAGES[name], environment.torch)]
            environment.provide(requirements, fitting, bare=BARE)
            kept = {*fitting, *BARE}
            cells = [counts(environment, p) if p.name in kept else "-, 0 failed" for p in PACKAGES.values()]
            main_job(session, environment)
            rows.append((title, *cells))
            failed += [title for cell in cells if not cell.endswith("0 failed")]
        finally:
            environment.remove()
    for row in [("", *PACKAGES), *rows]:
        session.log(" | ".join(f"{cell:>32}" for cell in row))
    if failed:
        session.error(f"failed with {', '.join(dict.fromkeys(failed))}")


def counts(environment: Environment, package: Package) -> str:
    """Test a package in an environment; return how many tests passed, were skipped and failed."""
    title = f"{environment.folder.name}-{package.name}"
    results = WORKSHOP / f"{title}.xml"
    pytest(environment, title, package.folder / "tests", *spread([]), f"--junit-xml={results}", success_codes=(0, 1))
    suite = ElementTree.parse(results).getroot()[0]
    found = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
    bad = found["failures"] + found["errors"]
    cell = f"{found['tests'] - found['skipped'] - bad} passed, {found['skipped']} skipped, {bad} failed"
    environment.session.log(f"{environment.folder.name}: {package.name}: {cell}")
    return cell


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Measure, beside plain PyTorch and accelerate 1.15.0, into benchmarks/RESULTS.md: `nox -s bench -- data`."""
    python = peer(session).folder / "bin" / "python"
    folder = ROOT / "benchmarks"
    # The session gpu measures what needs a GPU; torchrun starts experts, which prints its figures.
    others = ("experts", "gpu", "record")
    names = session.posargs or sorted(p.stem for p in folder.glob("*.py") if p.stem not in others)
    for name in names:
        # Accelerate looks for optional libraries at every step, so what only our tests need must not be there.
        environment = {
            "trainer": clients,
            "zero": with_deepspeed,
            "plan_train": with_deepspeed,
            "megatron": with_megatron,
        }.get(name, tree)(session)
        environment.run("python", folder / "record.py", name, "--peer", python)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Check and measure on one CUDA device, into benchmarks/RESULTS.md, in under 9 minutes; or `-- --dry-run`."""
    found = WORKSHOP / "gpu.json"
    found.unlink(missing_ok=True)
    kit, python = ROOT / "benchmarks" / "gpu.py", peer(session).folder / "bin" / "python"
    arguments = ("--peer", python, "--json", found, *session.posargs)
    tree(session).run("python", kit, *arguments, success_codes=[0, 1])  # 1: a row failed, and the table says which
    result = json.loads(found.read_text())
    if not result["dry_run"] and "--only" not in session.posargs:
        tree(session).run("python", kit.with_name("record.py"), "gpu", "--taken", found)
    if result["failed"]:
        session.error(f"rows that failed: {', '.join(result['failed'])}")


@nox.session(venv_backend="none", default=False)
def trackers(session: nox.Session) -> None:
    """Test every tracker with its real library, Comet and Aim too: their requirements are kept out of the one tree."""
    own = PACKAGES["accel-trackers"]
    requirements = sorted({text for name in ("test", "test-full", "test-apart") for text in own.groups[name]})
    environment = Environment(session, "trackers").provide(requirements, own.tested_with)
    pytest(environment, "trackers", own.folder / "tests", *session.posargs)


@nox.session(venv_backend="none", default=False)
def stores(session: nox.Session) -> None:
    """Test checkpoints in object stores on servers of other makes than that of the first tier: SeaweedFS, and gs://."""
    own = PACKAGES["accel-core"]
    requirements = {text for name in ("test", "test-full", "test-apart") for text in own.groups[name]}
    packages = ["accel-core", "accel-testing", "accel-bigmodel", "accel-launch", "accel-parallel", "accel-verify"]
    environment = Environment(session, "stores").provide(sorted(requirements.union(GROUPS["examples"])), packages)
    chosen = session.posargs or [own.folder / "tests" / "stores", INTEGRATION / "faults" / "test_stores.py"]
    pytest(environment, "stores", *chosen, env={"ACCEL_TEST_STORE": "seaweedfs"})
    if not session.posargs:
        pytest(environment, "stores", chosen[0], env={"ACCEL_TEST_STORE": "google"})


@nox.session(venv_backend="none", default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site into `dist/site`, strictly; `nox -s docs -- serve` shows it while you write."""
    # The packages whose commands are imported, not torch.
    read = ["accel-verify", "accel-bigmodel", "accel-plan", "accel-trackers"]
    needed = {text for name in read for text in PACKAGES[name].third_party if Requirement(text).name != "torch"}
    environment = Environment(session, "docs").provide(sorted(needed.union(GROUPS["docs"])), [])
    command = session.posargs or ["build", "--strict"]
    environment.run("mkdocs", *command, "-f", ROOT / "docs" / "site" / "mkdocs.yml", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none", default=False)
def gallery(session: nox.Session) -> None:
    """Run the gallery's examples on one and on two processes; `-- --record` keeps what they show for docs/.

    Blocks of the documentation that take long are run here too.
    """
    record = {"ACCEL_RECORD_GALLERY": "1"} if "--record" in session.posargs else {}
    arguments = [word for word in session.posargs if word != "--record"]
    folder = ROOT / "tests-integration"
    chosen = arguments or [folder / "gallery", folder / "documentation" / "test_blocks.py"]
    pytest(tree(session), "gallery", *chosen, env={"ACCEL_SLOW_BLOCKS": "1", **record})


@nox.session(venv_backend="none", default=False)
def casts(session: nox.Session) -> None:
    """Record the terminal casts of docs/casts/ from real commands: all, or those that are named."""
    tree(session).run("python", ROOT / "docs" / "site" / "casts.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def release(session: nox.Session) -> None:
    """Build every wheel and sdist into `dist/index`, which pip installs from, and the documentation site."""
    folder = ROOT / "dist" / "index"
    shutil.rmtree(folder, ignore_errors=True)
    environment = Environment(session, "build").provide(GROUPS["build"], [])
    for name, package in PACKAGES.items():
        with session.chdir(package.folder):
            environment.run("hatch", "build", folder / name, silent=True)
        links = (f'<a href="{path.name}">{path.name}</a>\n' for path in sorted((folder / name).iterdir()))
        (folder / name / "index.html").write_text("".join(links))
    environment.run("twine", "check", "--strict", *sorted(folder.glob("*/accel*")))
    taken = ("download", "-qq", "--no-deps", "--index-url", folder.as_uri(), "-d", session.create_tmp(), *PACKAGES)
    session.run(str(installer(session)), "-m", "pip", *taken, external=True)
    session.notify("docs")
    if any("https://accel.invalid" in path.read_text() for path in (ROOT / "packages").glob("*/pyproject.toml")):
        session.warn("Not to be uploaded: URLs of packages begin with https://accel.invalid, not an address.")


@nox.session(venv_backend="none", default=False)
def interop(session: nox.Session) -> None:
    """Run transformers, peft, trl and diffusers on the drop-in, beside accelerate 1.15.0 (slow)."""
    beside = Environment(session, "interop-peer")
    beside.provide([TORCH, "accelerate==1.15.0", *PACKAGES["accelerate"].groups["interop"]], [])
    variables = {"ACCEL_PEER_PYTHON": str(beside.folder / "bin" / "python")}
    pytest(clients(session), "interop", ROOT / "tests-integration" / "interop", *session.posargs, env=variables)
