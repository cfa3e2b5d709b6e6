"""What is asked of a run with FSDP besides its options: the axes of version 2."""

from accel_launch.questions.question import Question, answered, from_options

_SECOND = (("engine", "FSDP"), ("fsdp_version", "2"))


def questions(options: tuple[Question, ...]) -> tuple[Question, ...]:
    """Return the questions in their order."""
    return (
        *options,
        Question(
            "several_axes",
            "Lay the ranks out on several mesh axes?",
            ("no", "yes"),
            "no",
            when=answered(*_SECOND),
        ),
        *from_options("parallelism", *_SECOND, ("several_axes", "yes")),
    )
