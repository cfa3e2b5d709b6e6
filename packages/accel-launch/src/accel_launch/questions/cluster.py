"""The questions about one's own machines, in their order."""

from accel_core.host import environ
from accel_core.options.engines import Engine, engines, load
from accel_launch.questions.question import Answers, Question, from_key, from_options, on_several_machines
from accel_launch.settings.devices import SEVERAL_DEVICES, count_gpus

_YES_NO = ("no", "yes")
_GPU_TYPES = {f"several {label.removeprefix('MULTI_')}s": label for label in SEVERAL_DEVICES}
_MACHINES = ("one process", "several CPU processes", *_GPU_TYPES, "TPU")
SEVERAL_MACHINES, ON_SAGEMAKER = "several machines", "SageMaker"

ENVIRONMENT = Question(
    "compute_environment",
    "Where does the run take place?",
    ("this machine", SEVERAL_MACHINES, ON_SAGEMAKER),
    "this machine",
)
"""The first question; the others depend on its answer."""


def _kinds_here() -> tuple[str, ...]:
    """Return the kinds of hardware on this machine."""
    return (*_MACHINES[:2], *list(_GPU_TYPES)[: bool(count_gpus(environ.snapshot()))])


def _several(answers: Answers) -> bool:
    return bool(answers["kind"] != _MACHINES[0])


def _on_several(answers: Answers) -> bool:
    return bool(answers["compute_environment"] == SEVERAL_MACHINES)


def _machines_open(answers: Answers) -> bool:
    """Return whether the place of the run was not asked: the drop-in's dialogue begins after that question."""
    return answers["compute_environment"] == "LOCAL_MACHINE" and _several(answers)


def _on_a_pod(answers: Answers) -> bool:
    return bool(answers.get("tpu_use_cluster"))


def _gpus(answers: Answers) -> bool:
    return answers["kind"] in _GPU_TYPES


def _no_own_file(answers: Answers) -> bool:
    """Return whether no engine has a file of its own, which decides the precision; the question is `own_NAME_file`."""
    return all(answers.get(f"own_{engine.name}_file") != "yes" for engine in _ENGINES)


_ENGINES = [engine for engine in engines().values() if engine.switch]


def _of_engine(engine: Engine) -> tuple[Question, ...]:
    """Return the questions of an engine: those of its options, and what it puts around them."""
    rows = from_options(engine.name, ("engine", engine.title))
    return load(engine.questions)(rows) if engine.questions else rows


CLUSTER: tuple[Question, ...] = (
    Question(
        "kind",
        "What does the run use?",
        _MACHINES,
        _MACHINES[0],
        when=lambda answers: not _on_several(answers),
        here=_kinds_here,
    ),
    Question(
        "kind",
        "What hardware do the machines have?",
        _MACHINES[1:],
        next(iter(_GPU_TYPES)),
        when=_on_several,
        here=lambda: _kinds_here()[1:],
    ),
    from_key("num_machines", _on_several, text="How many machines take part?", default="2"),
    from_key("num_machines", _machines_open, text="How many machines take part?", default="1"),
    from_key("machine_rank", on_several_machines, text="What is this machine's number, from 0?", default="0"),
    from_key("main_process_ip", on_several_machines, text="What is the address of machine 0?"),
    from_key("main_process_port", on_several_machines, text="Which port of machine 0 may be used?", default="29500"),
    from_key("same_network", on_several_machines, text="Are all machines in one local network?", default="yes"),
    from_key("rdzv_backend", on_several_machines, text="How do the machines find one another?"),
    from_key("debug", _several, text="Check operations across ranks, which is slower?"),
    Question("compile", "Compile models with torch.compile?", _YES_NO, "no"),
    *from_options("dynamo", ("compile", "yes")),
    Question(
        "engine",
        "Which engine trains?",
        ("none", *(engine.title for engine in _ENGINES)),
        "none",
        when=lambda answers: _gpus(answers) or answers["kind"] == "several CPU processes",
    ),
    *(question for engine in _ENGINES for question in _of_engine(engine)),
    from_key("num_processes", _several, text="How many processes over all machines?", default="2"),
    from_key("gpu_ids", _gpus, text="Which GPUs, as comma-separated numbers?", default="all"),
    from_key("enable_cpu_affinity", _gpus, default="no"),
    from_key(
        "mpirun_hostfile",
        lambda answers: answers["kind"] == "several CPU processes",
        text="Start with mpirun over which hostfile? (empty: without mpirun)",
        optional=True,
    ),
    from_key("main_training_function", lambda answers: answers["kind"] == "TPU", default="main"),
    from_key("tpu_use_cluster", lambda answers: answers["kind"] == "TPU", text="Use a whole TPU pod?", default="no"),
    Question("tpu_name", "What is the pod's name?", when=_on_a_pod, path=("tpu_name",)),
    Question("tpu_zone", "In which zone is it?", when=_on_a_pod, path=("tpu_zone",), optional=True),
    from_key("tpu_use_sudo", _on_a_pod, default="no"),
    Question(
        "use_cpu",
        "Train on the CPU, even where there is a GPU?",
        _YES_NO,
        "no",
        parse=lambda answer: answer == "yes",
        when=lambda answers: answers["kind"] == _MACHINES[0],
        path=("use_cpu",),
    ),
    from_key("mixed_precision", _no_own_file, default="no"),
    *from_options("fp8", ("mixed_precision", "fp8")),
    from_key(
        "downcast_bf16",
        lambda answers: answers["kind"] == "TPU" and answers.get("mixed_precision") == "bf16",
        default="no",
    ),
)
"""Questions about one's own machines."""

TYPE_OF_KIND = {_MACHINES[0]: "NO", "several CPU processes": "MULTI_CPU", "TPU": "XLA", **_GPU_TYPES}
TYPE_OF_ENGINE = {engine.title: engine.label for engine in _ENGINES}
