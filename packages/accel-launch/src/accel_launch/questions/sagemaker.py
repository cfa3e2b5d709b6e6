"""The questions about a job on Amazon SageMaker."""

from accel_launch.questions.question import Question, from_setting
from accel_launch.settings.config import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from accel_launch.settings.table import BY_KEY


def _keyed(key: str, text: str, default: str = "", *choices: str, optional: bool = False) -> Question:
    """Return a question whose answer the file has under the same key."""
    return Question(key, text, choices, default, path=(key,), optional=optional)


SAGEMAKER: tuple[Question, ...] = (
    _keyed("profile", "Which AWS profile?", "default"),
    _keyed("region", "Which AWS region?", "us-east-1"),
    _keyed("iam_role_name", "Which IAM role may run SageMaker jobs?"),
    _keyed("image_uri", "Which Docker image? (empty: AWS's own)", optional=True),
    _keyed("distributed_type", "How is the job spread?", "NO", "NO", "DATA_PARALLEL", "MODEL_PARALLEL"),
    _keyed("ec2_instance_type", "Which instance?", "ml.p3.2xlarge"),
    from_setting(BY_KEY["num_machines"], lambda answers: True, text="How many instances?", default="1"),
    _keyed("base_job_name", "What do job names begin with?", "accelerate-sagemaker-1"),
    _keyed("pytorch_version", "Which PyTorch?", SAGEMAKER_PYTORCH_VERSION),
    _keyed("transformers_version", "Which Transformers?", SAGEMAKER_TRANSFORMERS_VERSION),
    _keyed("py_version", "Which Python?", SAGEMAKER_PYTHON_VERSION),
    _keyed("sagemaker_inputs_file", "Which file lists data channels? (empty: none)", optional=True),
    _keyed("sagemaker_metrics_file", "Which file lists metrics? (empty: none)", optional=True),
    from_setting(BY_KEY["mixed_precision"], lambda answers: True, default="no"),
)
"""Questions about a job on Amazon SageMaker."""
