"""Starting processes from a notebook or from Python: `notebook_launcher` and `debug_launcher`.

The function that a notebook defines cannot be imported by another process, so processes are forked: nothing may have
touched an accelerator before. Where something has, the import that did it is found out and named.
"""

import os
import subprocess
import sys
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from accel_core.errors import ConfigurationError, StateError, expect
from accel_core.host.environ import patch_environment, snapshot, write
from accel_core.host.environ import text as environment_text
from accel_core.options.enums import PRECISIONS
from accel_core.process import world
from accel_launch.settings.devices import count_gpus


class EarlyUseError(StateError, ValueError):
    """An Accelerator was made or CUDA was used before the processes were started, which only they may do."""


class PrepareForLaunch:
    """Turns a function into one that a started process can run: it sets the process's ranks first."""

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = getattr(distributed_type, "value", distributed_type)  # pickled with the function
        self.debug = debug

    def __call__(self, index: int, *args: object) -> None:
        """Run the function in a started process."""
        each = environment_text("LOCAL_WORLD_SIZE") or environment_text("WORLD_SIZE") or "1"
        first = int(environment_text("NODE_RANK") or 0) * int(each)
        if self.debug or self.distributed_type != "NO":
            write("LOCAL_RANK", index)
            write("RANK", first + index)
        write("FORK_LAUNCHED", 1)
        self.launcher(*args)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a training function on several processes, from a notebook.

    Args:
        function: The training function; it makes its own `Accelerator`.
        args: Its arguments.
        num_processes: Processes on this machine; one per GPU when None, one without GPUs.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        use_port: Port of machine 0 for several machines; one machine gets a free port unless another than the
            default is said.
        master_addr: Address of machine 0.
        node_rank: Number of this machine.
        num_nodes: Machines.
        rdzv_backend: How machines find each other.
        rdzv_endpoint: Address and port of the rendezvous; made of `master_addr` and `use_port` when empty.
        rdzv_conf: Details of the rendezvous.
        rdzv_id: Name of the run.
        max_restarts: How often processes are started again after a failure.
        monitor_interval: Seconds between looks at the processes.
        log_line_prefix_template: Text before every line of a process, with ${rank} and ${local_rank}.

    Raises:
        ConfigurationError: The precision is unknown, or a number is not valid.
        EarlyUseError: An Accelerator was made, or CUDA used, before; the message names the import that did.
        NotebookRankError: A process failed (a `LaunchError`, and torch's `ChildFailedError`); the message ends with the
            traceback of the one that failed first.

    Examples:
        >>> def train(rate):
        ...     accelerator = Accelerator()
        ...     accelerator.print(f"{rate} on {accelerator.num_processes}")
        >>> notebook_launcher(train, args=(0.1,), num_processes=2)  # doctest: +SKIP
        0.1 on 2
    """
    given = "notebook_launcher takes the function itself"
    expect(callable(function), function, given, "Write notebook_launcher(train), without calling it.")
    gpus = count_gpus(snapshot())
    number = num_processes if num_processes is not None else max(1, gpus)
    _check(mixed_precision, number, node_rank, num_nodes)
    variables = {"accelerate_mixed_precision": mixed_precision.lower()}
    if gpus < number and number * num_nodes > 1:  # one process alone takes the best device that torch finds
        variables["accelerate_use_cpu"] = "true"
    if number == 1 and num_nodes == 1:
        with patch_environment(**variables):
            function(*args)
        return
    _refuse_what_came_before(gpus)
    forked = import_module("accel_launch.launchers.forked")  # brings torch's elastic agent
    meeting = import_module("accel_launch.launchers.rendezvous")
    run_id = rdzv_id if rdzv_id != "none" else uuid.uuid4().hex
    with patch_environment(fork_launched=1, node_rank=node_rank, **variables):
        if num_nodes == 1:
            rendezvous = meeting.LocalRendezvous(run_id, 0 if use_port == "29500" else int(use_port))
        else:
            rendezvous = meeting.machines_rendezvous(
                rdzv_backend,
                rdzv_endpoint or f"{master_addr}:{use_port}",
                run_id,
                (num_nodes, num_nodes),
                None,
                node_rank,
                rdzv_conf or {},
            )
        forked.run_forked(
            function,
            args,
            rendezvous,
            processes=number,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
        )


def _check(mixed_precision: str, processes: int, node_rank: int, num_nodes: int) -> None:
    """Refuse arguments that are not valid."""
    if mixed_precision.lower() not in PRECISIONS:
        raise ConfigurationError(f"Mixed precision cannot be {mixed_precision!r}. Use one of {', '.join(PRECISIONS)}.")
    if not 0 <= node_rank < num_nodes:
        raise ConfigurationError(
            f"node_rank counts from 0 and is less than num_nodes; got {node_rank} of {num_nodes}. Correct one of them."
        )
    if processes < 1:
        raise ConfigurationError(f"A run needs at least one process; got {processes}. Pass a number of 1 or more.")


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several CPU processes, to try out what is meant for accelerators.

    Args:
        function: The function.
        args: Its arguments.
        num_processes: Processes.

    Raises:
        NotebookRankError: A process failed (a `LaunchError`, and torch's `ChildFailedError`); the message ends with the
            traceback of the one that failed first.

    Examples:
        >>> from train import train  # doctest: +SKIP
        >>> debug_launcher(train, args=(0.1,), num_processes=2)  # doctest: +SKIP
    """
    forked = import_module("accel_launch.launchers.forked")  # brings torch's elastic agent
    rendezvous = import_module("accel_launch.launchers.rendezvous").LocalRendezvous(uuid.uuid4().hex, 0)
    with patch_environment(fork_launched=1, accelerate_mixed_precision="no", accelerate_use_cpu="yes"):
        forked.run_forked(function, args, rendezvous, processes=num_processes)


def _refuse_what_came_before(gpus: int) -> None:
    if world.current() is not None:
        raise EarlyUseError(
            "Processes are started before any Accelerator is made; one was made in this notebook. Restart the "
            "kernel and make the Accelerator inside the training function."
        )
    if gpus and is_lost_to_forks():
        raise EarlyUseError(_early_cuda(_modules_of_notebook()))


def is_lost_to_forks() -> bool:
    """Return whether processes that are forked from this one cannot use CUDA, because this one did."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    child = os.fork()  # what asked for devices alone, as `torch.cuda.is_available`, is seen in a fork only
    if child == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(child, 0)[1] != 0


def _early_cuda(modules: Sequence[str]) -> str:
    culprit = initialized_by(modules)
    found = f"the import of `{culprit}` does it" if culprit else "code of this notebook did it"
    return (
        f"CUDA may not be used before processes are forked, and torch.cuda.is_available() uses it; {found}. Restart "
        "the kernel and move that into the training function."
    )


def _modules_of_notebook() -> list[str]:
    main = vars(sys.modules["__main__"])
    found: dict[str, None] = {}
    for value in list(main.values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.partition(".")[0] not in ("__main__", "builtins"):
            found[name] = None
    return list(found)


def initialized_by(modules: Sequence[str]) -> str | None:
    """Find the import that initializes CUDA, by importing modules one after the other in a fresh process."""
    probe = (
        "import importlib, sys\n"
        "from accel_launch.notebook import is_lost_to_forks\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except ImportError:\n        continue\n"
        "    if is_lost_to_forks():\n        print('INITIALISED', name)\n        break\n"
    )
    done = subprocess.run([sys.executable, "-c", probe, *modules], capture_output=True, text=True, check=False)
    initialized = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("INITIALISED ")]
    return initialized[0] if initialized else None


def test_launch() -> None:
    """Do what a launched process does first: find its device and join the others. Raises if that fails."""
    world.ensure()
