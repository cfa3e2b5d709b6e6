"""What a scheduler's own variables mean: SLURM, MPI, Kubernetes and torchrun."""

from collections.abc import Mapping

from accel_core.errors import ConfigurationError
from accel_core.process.rendezvous import LAUNCHERS, expand_hosts, slurm_port
from accel_launch.settings.reading import shortened
from accel_launch.settings.resolved import Resolved

_TORCHRUN, *_MPI = LAUNCHERS


def recognise(environment: Mapping[str, str]) -> dict[str, Resolved]:
    """Return what the surrounding scheduler says about a launch.

    Raises:
        ConfigurationError: SLURM started several tasks on a machine, each of which would start processes; or a variable
            that counts something is not a number.
    """
    readers = (_inside_torchrun, _torchrun_variables, _slurm, _mpi, _kubernetes)
    return next((found for reader in readers if (found := reader(environment))), {})


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, "")
    if text and not (text.isascii() and text.isdigit()):
        raise ConfigurationError(
            f"A scheduler's variable holds a whole number from 0; got {name}={shortened(text)!r}. Set it to one, or "
            "unset it where no scheduler started this process."
        )
    return int(text) if text else default


def _slurm(environment: Mapping[str, str]) -> dict[str, Resolved]:
    if "SLURM_STEP_ID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}
    machines = _number(environment, "SLURM_STEP_NUM_NODES", _number(environment, "SLURM_NNODES", 1))
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if tasks > machines:
        raise ConfigurationError(
            f"Under srun the launcher runs once on each machine; got {tasks} tasks on {machines} machines. Start "
            "it with `srun --ntasks-per-node=1 accel launch …`."
        )
    if machines == 1:  # nobody to meet: the defaults suffice
        return {}
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    return {
        "num_machines": Resolved(machines, "cluster", "SLURM_STEP_NUM_NODES"),
        "machine_rank": Resolved(_number(environment, "SLURM_NODEID"), "cluster", "SLURM_NODEID"),
        "main_process_ip": Resolved(hosts[0] if hosts else None, "cluster", "SLURM_STEP_NODELIST"),
        # Derived from the job and its step, so that all machines agree.
        "main_process_port": Resolved(slurm_port(job, step), "cluster", "SLURM_JOB_ID"),
        "rdzv_id": Resolved(f"slurm-{job}-{environment['SLURM_STEP_ID']}", "cluster", "SLURM_JOB_ID"),
    }


def _inside_torchrun(environment: Mapping[str, str]) -> dict[str, Resolved]:
    if not {_TORCHRUN.rank, _TORCHRUN.local_rank, _TORCHRUN.size, "TORCHELASTIC_RUN_ID"} <= environment.keys():
        return {}
    where = "TORCHELASTIC_RUN_ID: torchrun started this process as a rank"
    return {"nproc_per_node": Resolved(1, "cluster", where), "num_machines": Resolved(1, "cluster", where)}


def _torchrun_variables(environment: Mapping[str, str]) -> dict[str, Resolved]:
    names = {
        "PET_NNODES": "nnodes",
        "PET_NODE_RANK": "machine_rank",
        "PET_MASTER_ADDR": "main_process_ip",
        "PET_MASTER_PORT": "main_process_port",
        "PET_NPROC_PER_NODE": "nproc_per_node",
        "PET_RDZV_BACKEND": "rdzv_backend",
        "PET_MAX_RESTARTS": "max_restarts",
    }
    numbers = {"machine_rank", "main_process_port", "nproc_per_node", "max_restarts"}
    if "PET_NNODES" not in environment:
        return {}
    found = {}
    for name, key in names.items():
        text = environment.get(name, "")
        if text and (key not in numbers or text.isdigit()):
            found[key] = Resolved(int(text) if key in numbers else text, "cluster", name)
    return found


def _kubernetes(environment: Mapping[str, str]) -> dict[str, Resolved]:
    if "KUBERNETES_SERVICE_HOST" not in environment or "LOCAL_RANK" in environment:  # a rank, not a launcher
        return {}
    wanted = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if not all(environment.get(name) for name in wanted) or _number(environment, "WORLD_SIZE") < 2:
        return {}
    return {
        "num_machines": Resolved(_number(environment, "WORLD_SIZE"), "cluster", "WORLD_SIZE of the pod"),
        "machine_rank": Resolved(_number(environment, "RANK"), "cluster", "RANK of the pod"),
        "main_process_ip": Resolved(environment["MASTER_ADDR"], "cluster", "MASTER_ADDR of the pod"),
        "main_process_port": Resolved(_number(environment, "MASTER_PORT"), "cluster", "MASTER_PORT of the pod"),
    }


def _mpi(environment: Mapping[str, str]) -> dict[str, Resolved]:
    if "SLURM_STEP_ID" in environment:  # srun sets MPI's variables as well
        return {}
    for launcher in _MPI:
        if launcher.rank in environment and _number(environment, launcher.size, 1) > 1:
            where = f"{launcher.size}: mpirun started this process as a rank"
            return {"nproc_per_node": Resolved(1, "cluster", where), "num_machines": Resolved(1, "cluster", where)}
    return {}
