"""Record what the processes get from the original for the words in words.json.

Run it with the interpreter that has accelerate 1.15.0 installed:

    cd packages/accel-launch/tests/peer && PYTHON record.py

The original is driven through its own command line, in one process, with the starting of processes replaced by a
note of what would have been started. Libraries that only have to be importable for its checks (deepspeed,
transformer-engine, …) and an `mpirun` are stood in for by empty ones in a temporary folder. Nothing here is used by
the tests but the recorded file.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
EMPTY = {
    "deepspeed": "0.19.8",
    "transformer-engine": "2.0.0",
    "torchao": "0.18.0",
    "msamp": "0.4.0",
    "torch-xla": "2.9.0",
}
FILES = {
    "deepspeed/__init__.py": "__version__ = '0.19.8'",
    "deepspeed/launcher/__init__.py": "",
    "deepspeed/launcher/runner.py": "DEEPSPEED_ENVIRONMENT_NAME = '.deepspeed_env'",
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "",
    "torchao/__init__.py": "__version__ = '0.18.0'",
    "torchao/float8/__init__.py": "",
    "msamp/__init__.py": "",
    "torch_xla/__init__.py": "",
    "torch_xla/core/__init__.py": "",
    "torch_xla/core/xla_model.py": "",
    "torch_xla/distributed/__init__.py": "",
    "torch_xla/distributed/xla_multiprocessing.py": "def spawn(*words, **more): pass",
}


KEPT = [
    "nnodes",
    "nproc_per_node",
    "node_rank",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_conf",
    "master_addr",
    "master_port",
    "max_restarts",
    "monitor_interval",
    "role",
    "tee",
    "log_dir",
    "module",
    "no_python",
    "training_script_args",
]


def stand_ins(folder: Path) -> None:
    """Write the empty libraries and mpirun."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for name, version in EMPTY.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    (folder / "bin" / "mpirun").chmod(0o755)


def main() -> None:
    """Record every case."""
    folder = Path(tempfile.mkdtemp())
    stand_ins(folder)
    for name in [*os.environ]:
        if name.startswith(
            ("ACCEL", "FSDP", "OMP_", "MEGATRON", "PARALLELISM", "DEEPSPEED", "MASTER", "RANK", "WORLD")
        ):
            del os.environ[name]
    os.environ["HF_HOME"] = str(folder / "home")
    os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
    os.chdir(folder)
    hosts = "worker-0 slots=2\nworker-1 slots=2\n"
    for name, text in {"s.py": "def main():\n    pass\n", "ds.json": "{}", "hosts": hosts, "hosts2": hosts}.items():
        Path(name).write_text(text)
    (folder / "configs").symlink_to(HERE / "configs")
    sys.path.insert(0, str(folder))
    import torch.distributed.run as torchrun

    from accelerate.commands import launch

    noted: dict = {}
    real = subprocess.Popen

    class Noted:
        """Stands for a process: notes what it would have been."""

        def __new__(cls, command, *words, **more):
            asked = isinstance(command, str) or command[-1] == "--version"
            return real(command, *words, **more) if asked else object.__new__(cls)

        def __init__(self, command, *words, env=None, **more):
            if command[0] != "nvidia-smi":
                noted.update(kind="process", command=list(command), env=dict(os.environ if env is None else env))
            self.args, self.returncode, self.pid = command, 0, 1
            self.nothing = "" if more.get("text") or more.get("universal_newlines") else b""

        def wait(self, *words, **more):
            return 0

        def poll(self):
            return 0

        def communicate(self, *words, **more):
            return (self.nothing, self.nothing)

        def __enter__(self):
            return self

        def __exit__(self, *words):
            return False

    def note_torchrun(args):
        noted.update(kind="torchrun", arguments=dict(vars(args)), env=dict(os.environ))

    found = {}
    for case, words in json.loads((HERE / "words.json").read_text()).items():
        noted.clear()
        before, words_before, path_before = dict(os.environ), list(sys.argv), list(sys.path)
        subprocess.Popen, torchrun.run = Noted, note_torchrun
        record: dict = {}
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                launch.launch_command(launch.launch_command_parser().parse_args(words))
        except (Exception, SystemExit) as error:
            record["error"] = f"{type(error).__name__}: {error}"
        finally:
            subprocess.Popen = real
        if noted:
            record["kind"] = noted["kind"]
            record["environment"] = {k: v for k, v in noted["env"].items() if before.get(k) != v}
            record["environment"].pop("PYTHONPATH", None)
        if "command" in noted:
            record["command"] = ["PYTHON" if word == sys.executable else word for word in noted["command"]]
        if "arguments" in noted:
            record["arguments"] = {name: noted["arguments"].get(name) for name in KEPT}
        os.environ.clear()
        os.environ.update(before)
        sys.argv[:], sys.path[:] = words_before, path_before
        found[case] = record
    (HERE / "accelerate-1.15.0.json").write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
