"""What a setting is, and the settings that every launch has.

One row per setting says how it is written on the command line, in a configuration file and in the environment. Rows of
engines come from their option tables (`accel_launch.settings.table`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accel_core.options.enums import PRECISIONS
from accel_core.options.option import Option, boolean
from accel_launch.settings.metavars import metavar_of
from accel_launch.settings.rules import COUNT, FROM_ZERO, GPUS, MACHINES, PAIRS, PORT, SECONDS, TEE, Rule

__all__ = ["ELASTIC", "HARDWARE", "LAUNCH", "LOOK", "PROCESSES", "Setting", "switch"]

Kind = Literal["value", "switch", "off-switch", "append"]


_GONE = {
    *("aot_ts_nvfuser", "nvprims_nvfuser", "ofi", "fx2trt", "onnxrt"),
    *("aot_torchxla_trace_once", "torchxla_trace_once"),
}
"""Compilers that torch has no more; a file of an older version may still name one."""


@dataclass(frozen=True)
class Setting:
    """One thing about a run that can be said in four places.

    Attributes:
        key: Name in the parsed arguments.
        topic: Heading of the help under which it stands.
        help: One sentence.
        parse: Turns text into the value; raises ValueError for text that it cannot read.
        default: Value where none is given.
        choices: Values allowed, empty where any is.
        kind: A value, a switch that is on when written, one that is off when written, or a value that may be repeated.
        flags: Flags other than `--key`; they come first.
        named: Whether `--key` itself is a flag.
        path: Keys that lead to it in a configuration file, empty where a file cannot say it.
        environment: Variable that says it to the launcher, empty where none does.
        engine: Engine that the setting belongs to; only a run with that engine hands it to the processes.
        option: The row of the training side that it is made of, if it is made of one.
        rule: What a value has to be beyond its type, None where any will do.
    """

    key: str
    topic: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[Any, ...] = ()
    kind: Kind = "value"
    flags: tuple[str, ...] = ()
    named: bool = True
    path: tuple[str, ...] = ()
    environment: str = ""
    engine: str = ""
    option: Option | None = None
    rule: Rule | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the flags in the spelling with dashes."""
        return (*self.flags, f"--{self.key.replace('_', '-')}") if self.named else self.flags

    @property
    def offered(self) -> tuple[Any, ...]:
        """Return the choices that exist today; the others are still read from a file."""
        return tuple(choice for choice in self.choices if str(choice).lower() not in _GONE)

    @property
    def metavar(self) -> str:
        """Return what stands for the value in the help."""
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


def switch(key: str, topic: str, help: str, *path: str, environment: str = "", **rest: Any) -> Setting:
    """Return a setting that is on when its flag is written."""
    return Setting(
        key, topic, help, boolean, rest.pop("default", False), kind="switch", path=path, environment=environment, **rest
    )


LAUNCH: tuple[Setting, ...] = (
    switch("cpu", HARDWARE, "Train on the CPU.", "use_cpu", environment="ACCELERATE_USE_CPU"),
    switch("multi_gpu", HARDWARE, "Start one process per GPU.", environment="ACCEL_MULTI_GPU"),
    switch("tpu", HARDWARE, "Train on a TPU through torch-xla.", environment="ACCEL_TPU"),
    switch(
        "use_parallelism_config",
        HARDWARE,
        "Lay the ranks out on several mesh axes.",
        environment="ACCELERATE_USE_PARALLELISM_CONFIG",
    ),
    Setting(
        "gpu_ids",
        HARDWARE,
        "GPUs to use, as comma-separated numbers, or `all`.",
        path=("gpu_ids",),
        environment="ACCEL_GPU_IDS",
        rule=GPUS,
    ),
    Setting(
        "num_processes",
        PROCESSES,
        "Total number of processes, over all machines.",
        int,
        path=("num_processes",),
        environment="ACCEL_NUM_PROCESSES",
        flags=("-n",),
        rule=COUNT,
    ),
    Setting(
        "nproc_per_node",
        PROCESSES,
        "Number of processes on each machine; --num-processes is the total.",
        int,
        environment="ACCEL_NPROC_PER_NODE",
        rule=COUNT,
    ),
    Setting(
        "num_machines",
        PROCESSES,
        "Number of machines.",
        int,
        1,
        path=("num_machines",),
        environment="ACCEL_NUM_MACHINES",
        rule=COUNT,
    ),
    Setting(
        "nnodes",
        PROCESSES,
        "Number of machines, or MIN:MAX for a run that machines may join and leave.",
        environment="ACCEL_NNODES",
        rule=MACHINES,
    ),
    Setting(
        "machine_rank",
        PROCESSES,
        "Number of this machine, from 0.",
        int,
        path=("machine_rank",),
        environment="ACCEL_MACHINE_RANK",
        rule=FROM_ZERO,
    ),
    Setting(
        "main_process_ip",
        PROCESSES,
        "Address of the machine with rank 0.",
        path=("main_process_ip",),
        environment="ACCEL_MAIN_PROCESS_IP",
    ),
    Setting(
        "main_process_port",
        PROCESSES,
        "Port of rank 0; on a single machine, unset or 0 picks a free one.",
        int,
        path=("main_process_port",),
        environment="ACCEL_MAIN_PROCESS_PORT",
        rule=PORT,
    ),
    switch(
        "same_network",
        PROCESSES,
        "All machines share one local network.",
        "same_network",
        environment="ACCEL_SAME_NETWORK",
    ),
    Setting(
        "num_cpu_threads_per_process",
        PROCESSES,
        "CPU threads that each process computes with.",
        int,
        path=("num_cpu_threads_per_process",),
        environment="OMP_NUM_THREADS",
        rule=FROM_ZERO,
    ),
    switch(
        "enable_cpu_affinity",
        PROCESSES,
        "Bind each process to the cores near its GPU.",
        "enable_cpu_affinity",
        environment="ACCELERATE_CPU_AFFINITY",
    ),
    Setting(
        "mixed_precision",
        TRAINING,
        "Precision of the computation.",
        default=None,
        choices=tuple(PRECISIONS),
        path=("mixed_precision",),
        environment="ACCELERATE_MIXED_PRECISION",
    ),
    Setting(
        "config_file",
        SCRIPT,
        "Configuration file to read instead of the default one.",
        environment="ACCEL_CONFIG_FILE",
    ),
    Setting(
        "module",
        SCRIPT,
        "The script is a module, as in `python -m`.",
        boolean,
        kind="switch",
        flags=("-m",),
    ),
    Setting("no_python", SCRIPT, "The script is a program, not a Python file.", boolean, kind="switch"),
    Setting(
        "main_training_function",
        SCRIPT,
        "Function of the script that each TPU process runs.",
        path=("main_training_function",),
        environment="ACCEL_MAIN_TRAINING_FUNCTION",
    ),
    Setting(
        "quiet",
        OUTPUT,
        "Print no report when a process fails, only what the processes print.",
        boolean,
        kind="switch",
        flags=("-q",),
    ),
    Setting(
        "debug",
        OUTPUT,
        "Check shapes and operations across ranks, and show what the launcher does.",
        boolean,
        kind="switch",
        path=("debug",),
        environment="ACCELERATE_DEBUG_MODE",
    ),
    Setting(
        "tee",
        OUTPUT,
        "Prefix lines with their rank: 1 output, 2 errors, 3 both; 0:3,1:2 chooses by local rank.",
        default="0",
        flags=("-t",),
        environment="ACCEL_TEE",
        rule=TEE,
    ),
    Setting(
        "log_dir",
        OUTPUT,
        "Folder that keeps the output of every rank and the record of a failure.",
        environment="ACCEL_LOG_DIR",
    ),
    Setting(
        "watchdog",
        OUTPUT,
        "Seconds without progress on any rank after which stacks are shown and the run ends.",
        float,
        environment="ACCEL_WATCHDOG",
        rule=SECONDS,
    ),
    Setting("role", ELASTIC, "Name of the group of processes.", default="default", environment="ACCEL_ROLE"),
    Setting(
        "rdzv_backend",
        ELASTIC,
        "How machines find each other: static, c10d, etcd.",
        default="static",
        path=("rdzv_backend",),
        environment="ACCEL_RDZV_BACKEND",
    ),
    Setting(
        "rdzv_conf",
        ELASTIC,
        "Settings of the rendezvous, as comma-separated KEY=VALUE pairs.",
        default="",
        environment="ACCEL_RDZV_CONF",
        rule=PAIRS,
    ),
    Setting(
        "rdzv_id",
        ELASTIC,
        "Name of the run; the same on every machine.",
        environment="ACCEL_RDZV_ID",
    ),
    Setting(
        "max_restarts",
        ELASTIC,
        "How many times the processes are restarted after a failure.",
        int,
        0,
        environment="ACCEL_MAX_RESTARTS",
        rule=FROM_ZERO,
    ),
    Setting(
        "monitor_interval",
        ELASTIC,
        "Seconds between checks of the processes.",
        float,
        0.1,
        environment="ACCEL_MONITOR_INTERVAL",
        rule=SECONDS,
    ),
    switch("explain", LOOK, "Print what is set, where that comes from and what would start, and start nothing."),
    switch("all", LOOK, "Print all settings and engines with --explain, defaults too."),
    switch("dry_run", LOOK, "Print commands, environment and layout of every machine, and start nothing."),
    switch("json", LOOK, "Print --explain and --dry-run as JSON."),
    Setting(
        "tpu_use_cluster",
        TPU,
        "Use every machine of a TPU pod.",
        boolean,
        False,
        kind="switch",
        named=False,
        flags=("--tpu-cluster",),
        path=("tpu_use_cluster",),
        environment="ACCEL_TPU_USE_CLUSTER",
    ),
    Setting(
        "tpu_use_cluster",
        TPU,
        "Use this machine alone.",
        boolean,
        True,
        kind="off-switch",
        named=False,
        flags=("--no-tpu-cluster",),
    ),
    switch(
        "tpu_use_sudo",
        TPU,
        "Start the script with sudo on the TPU machines.",
        "tpu_use_sudo",
        environment="ACCEL_TPU_USE_SUDO",
    ),
    Setting("vm", TPU, "Machine of the pod; may be repeated.", kind="append", path=("tpu_vm",)),
    Setting(
        "env", TPU, "Variable NAME=VALUE for the pod's machines; may be repeated.", kind="append", path=("tpu_env",)
    ),
    switch(
        "downcast_bf16",
        TPU,
        "Compute in bf16 where the script uses float32.",
        "downcast_bf16",
        environment="ACCEL_DOWNCAST_BF16",
    ),
    Setting(
        "mpirun_hostfile",
        MPI,
        "File with the hosts, one per line; starts the processes with mpirun.",
        path=("mpirun_config", "mpirun_hostfile"),
        environment="ACCEL_MPIRUN_HOSTFILE",
    ),
    Setting(
        "aws_access_key_id", SAGEMAKER, "AWS access key that may start SageMaker jobs.", environment="AWS_ACCESS_KEY_ID"
    ),
    Setting("aws_secret_access_key", SAGEMAKER, "Secret of that access key.", environment="AWS_SECRET_ACCESS_KEY"),
)
"""Settings of every launch, in the order of the help."""
