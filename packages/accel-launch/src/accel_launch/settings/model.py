"""What a setting is, and the settings that every launch has.

One row per setting says how it is written on the command line, in a configuration file and in the environment. Rows of
engines come from their option tables (`accel_launch.settings.table`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from accel_core.options.enums import PRECISIONS
from accel_core.options.option import Option, boolean
from accel_launch.settings.metavars import metavar_of
from accel_launch.settings.rules import (
    COUNT,
    FIELDS,
    FROM_ZERO,
    GPUS,
    MACHINES,
    PAIRS,
    PORT,
    SBATCH,
    SECONDS,
    TEE,
    Rule,
)

Kind = Literal["value", "switch", "off-switch", "append"]


_GONE = {
    *("aot_ts_nvfuser", "nvprims_nvfuser", "ofi", "fx2trt", "onnxrt"),
    *("aot_torchxla_trace_once", "torchxla_trace_once"),
}
"""Compilers that torch no longer has; a file of an older version may still name one."""


@dataclass(frozen=True)
class Setting:
    """One setting of a run: its flag, variable, file key and default."""

    key: str  # name in the parsed arguments
    topic: str  # heading of the help under which it stands
    help: str  # one sentence
    parse: Callable[[str], Any] = str  # turns text into the value; raises ValueError for text that it cannot read
    default: Any = None  # value where none is given
    choices: tuple[Any, ...] = ()  # values allowed, empty where any is
    # A value, a switch that is on when written, one that is off when written, or a value that may be repeated.
    kind: Kind = "value"
    flags: tuple[str, ...] = ()  # flags other than `--key`; they come first
    named: bool = True  # whether `--key` itself is a flag
    path: tuple[str, ...] = ()  # keys that lead to it in a configuration file, empty where a file cannot say it
    environment: str = ""  # variable that says it to the launcher, empty where none does
    engine: str = ""  # engine or launcher that the setting belongs to; a run without it warns of the flag
    option: Option | None = None  # the row of the training side that it is made of, if it is made of one
    rule: Rule | None = None  # what a value has to be beyond its type, None where any will do

    @property
    def words(self) -> tuple[str, ...]:
        """Return the flags in the spelling with dashes."""
        return (*self.flags, f"--{self.key.replace('_', '-')}") if self.named else self.flags

    @property
    def offered(self) -> tuple[Any, ...]:
        """Return the current choices; older ones are still read from a file."""
        return tuple(choice for choice in self.choices if str(choice).lower() not in _GONE)

    @property
    def metavar(self) -> str:
        """Return the placeholder of the value in the help."""
        if self.choices:
            return f"{{{','.join(map(str, self.offered))}}}"
        return metavar_of(self.key, self.parse if self.option is None else self.option.parser)

    @property
    def yes_or_no(self) -> bool:
        """Return whether the value is a truth value."""
        return self.kind in ("switch", "off-switch") or self.parse is boolean


HARDWARE = "Hardware"
PROCESSES = "Processes and machines"
TRAINING = "Training"
SCRIPT = "Script"
OUTPUT = "Output and errors"
ELASTIC = "Rendezvous and restarts"
LOOK = "Look before starting"
TPU = "TPU"
MPI = "MPI"
SAGEMAKER = "SageMaker"
SLURM = "SLURM"
RAY = "Ray"


def switch(key: str, topic: str, help: str, **rest: Any) -> Setting:
    """Return a setting that is on when its flag is written."""
    row = Setting(key, topic, help, boolean, False, kind="switch")
    return replace(row, **rest)


def _variable(key: str, topic: str, help: str, *, rule: Rule | None = None, **rest: Any) -> Setting:
    """Return a setting that a flag and a variable named after it say."""
    parse = str if rule is None else rule.parse
    row = Setting(key, topic, help, parse, environment=f"ACCEL_{key.upper()}", rule=rule)
    return replace(row, **rest)


def _filed(key: str, topic: str, help: str, *, rule: Rule | None = None, **rest: object) -> Setting:
    """Return a setting that a configuration file says too, under the same name."""
    return _variable(key, topic, help, rule=rule, path=(key,), **rest)


def _switch(key: str, topic: str, help: str, **rest: object) -> Setting:
    """Return a setting that is on when its flag, or a variable named after it, says so."""
    return switch(key, topic, help, **{"environment": f"ACCEL_{key.upper()}", **rest})


def _filed_switch(key: str, topic: str, help: str, **rest: object) -> Setting:
    """Return the same, which a configuration file says too, under the same name."""
    return _switch(key, topic, help, path=(key,), **rest)


LAUNCH: tuple[Setting, ...] = (
    switch("cpu", HARDWARE, "Train on the CPU.", path=("use_cpu",), environment="ACCELERATE_USE_CPU"),
    _switch("multi_gpu", HARDWARE, "Start one process per GPU."),
    _switch("tpu", HARDWARE, "Train on a TPU through torch-xla."),
    switch(
        "use_parallelism_config",
        HARDWARE,
        "Lay the ranks out on several mesh axes.",
        environment="ACCELERATE_USE_PARALLELISM_CONFIG",
    ),
    _filed("gpu_ids", HARDWARE, "GPUs to use, as in 0,2; all of them if unset.", rule=GPUS),
    _variable("launcher", PROCESSES, "Scheduler that the run is submitted to.", choices=("slurm", "ray")),
    _filed("num_processes", PROCESSES, "Processes on all machines; one per GPU if unset.", flags=("-n",), rule=COUNT),
    _variable(
        "nproc_per_node",
        PROCESSES,
        "Number of processes on each machine; --num-processes is the total.",
        flags=("--processes-per-machine",),
        rule=COUNT,
    ),
    _filed("num_machines", PROCESSES, "Number of machines.", flags=("--machines",), default=1, rule=COUNT),
    _variable(
        "nnodes", PROCESSES, "Number of machines, or MIN:MAX for a run that machines may join and leave.", rule=MACHINES
    ),
    _filed("machine_rank", PROCESSES, "Number of this machine, from 0.", rule=FROM_ZERO),
    _filed("main_process_ip", PROCESSES, "Address of the machine with rank 0."),
    _filed(
        "main_process_port", PROCESSES, "Port of rank 0; on a single machine, unset or 0 picks a free one.", rule=PORT
    ),
    _filed_switch("same_network", PROCESSES, "All machines share one local network."),
    _filed(
        "num_cpu_threads_per_process",
        PROCESSES,
        "CPU threads that each process computes with.",
        environment="OMP_NUM_THREADS",
        rule=FROM_ZERO,
    ),
    _filed_switch(
        "enable_cpu_affinity",
        PROCESSES,
        "Bind each process to the cores near its GPU.",
        environment="ACCELERATE_CPU_AFFINITY",
    ),
    _filed(
        "mixed_precision",
        TRAINING,
        "Precision of the computation.",
        choices=tuple(PRECISIONS),
        environment="ACCELERATE_MIXED_PRECISION",
    ),
    _variable("config_file", SCRIPT, "Configuration file instead of the default one."),
    switch("module", SCRIPT, "The script is a module, as in `python -m`.", default=None, flags=("-m",)),
    switch("no_python", SCRIPT, "The script is a program, not a Python file.", default=None),
    _filed("main_training_function", SCRIPT, "Function of the script that each TPU process runs."),
    switch(
        "quiet",
        OUTPUT,
        "Print no report when a process fails, only what the processes print.",
        default=None,
        flags=("-q",),
    ),
    _filed_switch(
        "debug",
        OUTPUT,
        "Check shapes and operations across ranks, and show what the launcher does.",
        environment="ACCELERATE_DEBUG_MODE",
        default=None,
    ),
    _variable(
        "tee",
        OUTPUT,
        "Prefix lines with their rank: 1 output, 2 errors, 3 both; 0:3,1:2 chooses by local rank.",
        default="0",
        flags=("-t",),
        rule=TEE,
    ),
    _switch("all_frames", OUTPUT, "Show all frames of a failure's traceback, also those outside the script's folder."),
    _variable("log_dir", OUTPUT, "Folder that keeps the output of every rank and the record of a failure."),
    _variable("watchdog", OUTPUT, "After this many seconds without progress, print all stacks and stop.", rule=SECONDS),
    _variable("role", ELASTIC, "Name of the group of processes.", default="default"),
    _filed("rdzv_backend", ELASTIC, "How machines find each other: static, c10d, etcd.", default="static"),
    _variable(
        "rdzv_conf", ELASTIC, "Settings of the rendezvous, as comma-separated KEY=VALUE pairs.", default="", rule=PAIRS
    ),
    _variable("rdzv_id", ELASTIC, "Name of the run; the same on every machine."),
    _variable(
        "max_restarts",
        ELASTIC,
        "How many times the processes are restarted after a failure.",
        default=0,
        rule=FROM_ZERO,
    ),
    _variable("monitor_interval", ELASTIC, "Seconds between checks of the processes.", default=0.1, rule=SECONDS),
    switch("explain", LOOK, "Print what is set, where that comes from and what would start, and start nothing."),
    switch("all", LOOK, "Print all settings and engines with --explain, defaults too."),
    switch("dry_run", LOOK, "Print commands, environment and layout of every machine, and start nothing."),
    switch("json", LOOK, "Print --explain and --dry-run as JSON."),
    _filed_switch("tpu_use_cluster", TPU, "Use every machine of a TPU pod.", named=False, flags=("--tpu-cluster",)),
    switch(
        "tpu_use_cluster",
        TPU,
        "Use this machine alone.",
        default=True,
        kind="off-switch",
        named=False,
        flags=("--no-tpu-cluster",),
    ),
    _filed_switch("tpu_use_sudo", TPU, "Start the script with sudo on the TPU machines."),
    Setting("vm", TPU, "Machine of the pod; may be repeated.", kind="append", path=("tpu_vm",)),
    Setting(
        "env", TPU, "Variable NAME=VALUE for the pod's machines; may be repeated.", kind="append", path=("tpu_env",)
    ),
    _filed_switch("downcast_bf16", TPU, "Compute in bf16 where the script uses float32."),
    _variable(
        "mpirun_hostfile",
        MPI,
        "File with the hosts, one per line; starts the processes with mpirun.",
        path=("mpirun_config", "mpirun_hostfile"),
    ),
    Setting(
        "slurm",
        SLURM,
        "Option of sbatch, as in partition=gpu; may be repeated.",
        kind="append",
        engine="slurm",
        rule=SBATCH,
    ),
    Setting("address", RAY, "Address of the Ray cluster.", default="auto", environment="RAY_ADDRESS", engine="ray"),
    Setting(
        "ray",
        RAY,
        "What Ray prepares on its machines, as in working_dir=.; may be repeated.",
        kind="append",
        engine="ray",
        rule=FIELDS,
    ),
    Setting(
        "aws_access_key_id", SAGEMAKER, "AWS access key that may start SageMaker jobs.", environment="AWS_ACCESS_KEY_ID"
    ),
    Setting("aws_secret_access_key", SAGEMAKER, "Secret of that access key.", environment="AWS_SECRET_ACCESS_KEY"),
)
"""Settings of every launch, in the order of the help."""
