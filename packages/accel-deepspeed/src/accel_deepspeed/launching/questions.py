"""What is asked of a run with DeepSpeed besides its options: its own file, and how it reaches other machines."""

from accel_launch.questions.question import Answers, Question, answered, from_key, on_several_machines

_CHOSEN = answered(("engine", "DeepSpeed"))


def _on_machines(answers: Answers) -> bool:
    return _CHOSEN(answers) and on_several_machines(answers)


def _reached(answers: Answers) -> bool:
    return _on_machines(answers) and answers.get("deepspeed_multinode_launcher") != "standard"


def _without_inclusion(answers: Answers) -> bool:
    return _reached(answers) and not answers.get("deepspeed_inclusion_filter")


def questions(options: tuple[Question, ...]) -> tuple[Question, ...]:
    """Return the questions in their order."""
    return (
        Question("own_deepspeed_file", "Is there a DeepSpeed JSON file?", ("no", "yes"), "no", when=_CHOSEN),
        *options,
        from_key("deepspeed_multinode_launcher", _on_machines, default="pdsh"),
        from_key("deepspeed_hostfile", _reached),
        from_key("deepspeed_inclusion_filter", _reached, optional=True),
        from_key("deepspeed_exclusion_filter", _without_inclusion, optional=True),
    )
