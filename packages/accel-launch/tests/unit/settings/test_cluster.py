"""Schedulers are recognized by their variables, and only where they started this process for it."""

import pytest

from accel_core.errors import ConfigurationError
from accel_launch.settings.cluster import recognise

SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NODEID": "1",
}


def values(environment: dict[str, str]) -> dict[str, object]:
    """Return what is recognized, without its origin."""
    return {key: said.value for key, said in recognise(environment).items()}


def test_srun_gives_machines_rank_and_master() -> None:
    """One task per machine: number, rank, address and a port that all machines derive alike."""
    found = values(SRUN)
    assert (found["num_machines"], found["machine_rank"], found["main_process_ip"]) == (2, 1, "node07")
    assert found["main_process_port"] == values({**SRUN, "SLURM_NODEID": "0"})["main_process_port"]


def test_sbatch_alone_is_one_process() -> None:
    """Variables of a batch script without an srun step mean nothing."""
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert recognise({**batch, "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NNODES": "4"}) == {}


def test_several_tasks_on_a_machine_are_refused() -> None:
    """Srun with several tasks per machine would start processes several times."""
    with pytest.raises(ConfigurationError, match="--ntasks-per-node=1"):
        recognise({**SRUN, "SLURM_STEP_NUM_TASKS": "8"})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, {"nproc_per_node": 1, "num_machines": 1}),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, {"nproc_per_node": 1, "num_machines": 1}),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {}),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_NPROC_PER_NODE": "auto"},
            {"nnodes": "2", "machine_rank": 1, "main_process_ip": "a"},
        ),
        (
            {
                "KUBERNETES_SERVICE_HOST": "k",
                "MASTER_ADDR": "job-0",
                "MASTER_PORT": "23456",
                "WORLD_SIZE": "3",
                "RANK": "2",
            },
            {"num_machines": 3, "machine_rank": 2, "main_process_ip": "job-0", "main_process_port": 23456},
        ),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "3", "RANK": "2"}, {}),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            {"nproc_per_node": 1, "num_machines": 1},
        ),
        ({}, {}),
    ],
)
def test_other_schedulers(environment: dict[str, str], expected: dict[str, object]) -> None:
    """MPI, Kubernetes and torchrun say what they say, and nothing where they did not start this process."""
    assert values(environment) == expected


POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "2",
    "RANK": "1",
}


@pytest.mark.parametrize(
    ("environment", "name", "text"),
    [
        (POD, "MASTER_PORT", "tcp://10.3.240.1:23456"),  # what Kubernetes sets in every pod beside a service `master`
        (POD, "WORLD_SIZE", "two"),
        (POD, "RANK", "-1"),
        (SRUN, "SLURM_STEP_NUM_TASKS", "1(x2)"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE", "many"),
    ],
)
def test_a_variable_that_is_no_number_is_named(environment: dict[str, str], name: str, text: str) -> None:
    """What should count something and does not is an error with its name and what it holds."""
    with pytest.raises(ConfigurationError, match="whole number") as caught:
        recognise({**environment, name: text})
    assert f"{name}={text!r}" in str(caught.value)
