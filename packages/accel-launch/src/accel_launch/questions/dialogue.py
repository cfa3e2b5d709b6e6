"""From answers to a configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from accel_launch.questions.ask import Asker, ask_all
from accel_launch.questions.cluster import CLUSTER, ENVIRONMENT, ON_SAGEMAKER, TYPE_OF_ENGINE, TYPE_OF_KIND
from accel_launch.questions.question import Question
from accel_launch.questions.sagemaker import SAGEMAKER


def hold_dialogue(asker: Asker) -> dict[str, Any]:
    """Ask everything and return the configuration."""
    answers = ask_all((ENVIRONMENT,), asker)
    sagemaker = answers["compute_environment"] == ON_SAGEMAKER
    questions = (ENVIRONMENT, *(SAGEMAKER if sagemaker else CLUSTER))
    return configuration_of(ask_all(questions, asker, answers), questions)


def configuration_of(answers: Mapping[str, Any], questions: Sequence[Question]) -> dict[str, Any]:
    """Arrange answers as a configuration file has them."""
    sagemaker = answers["compute_environment"] in (ON_SAGEMAKER, "AMAZON_SAGEMAKER")
    config: dict[str, Any] = {"compute_environment": "AMAZON_SAGEMAKER" if sagemaker else "LOCAL_MACHINE"}
    for question in questions:
        value = answers.get(question.key)
        if not question.path or value is None:
            continue
        section = config
        for key in question.path[:-1]:
            section = section.setdefault(key, {})
        section[question.path[-1]] = value
    if sagemaker:
        return {**config, "use_cpu": False, "debug": False}
    kind = TYPE_OF_ENGINE.get(answers.get("engine") or "none", TYPE_OF_KIND[answers["kind"]])
    usual = {
        "distributed_type": kind,
        "debug": False,
        "use_cpu": answers["kind"] == "several CPU processes",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": 1,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
    }
    return {**usual, **config}
