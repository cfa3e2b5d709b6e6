"""The questions about a job on Amazon SageMaker."""

from accel_launch.questions.question import Question, from_setting
from accel_launch.settings.config import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from accel_launch.settings.table import BY_KEY

__all__ = ["SAGEMAKER"]

SAGEMAKER: tuple[Question, ...] = (
    Question("profile", "Which AWS profile?", (), "default", path=("profile",)),
    Question("region", "Which AWS region?", (), "us-east-1", path=("region",)),
    Question("iam_role_name", "Which IAM role may run SageMaker jobs?", path=("iam_role_name",)),
    Question("image_uri", "Which Docker image? (empty: AWS's own)", path=("image_uri",), optional=True),
    Question(
        "distributed_type",
        "How is the job spread?",
        ("NO", "DATA_PARALLEL", "MODEL_PARALLEL"),
        "NO",
        path=("distributed_type",),
    ),
    Question("ec2_instance_type", "Which instance?", (), "ml.p3.2xlarge", path=("ec2_instance_type",)),
    from_setting(BY_KEY["num_machines"], lambda answers: True, text="How many instances?", default="1"),
    Question("base_job_name", "What do job names begin with?", (), "accelerate-sagemaker-1", path=("base_job_name",)),
    Question("pytorch_version", "Which PyTorch?", (), SAGEMAKER_PYTORCH_VERSION, path=("pytorch_version",)),
    Question(
        "transformers_version",
        "Which Transformers?",
        (),
        SAGEMAKER_TRANSFORMERS_VERSION,
        path=("transformers_version",),
    ),
    Question("py_version", "Which Python?", (), SAGEMAKER_PYTHON_VERSION, path=("py_version",)),
    Question(
        "sagemaker_inputs_file",
        "Which file lists data channels? (empty: none)",
        path=("sagemaker_inputs_file",),
        optional=True,
    ),
    Question(
        "sagemaker_metrics_file",
        "Which file lists metrics? (empty: none)",
        path=("sagemaker_metrics_file",),
        optional=True,
    ),
    from_setting(BY_KEY["mixed_precision"], lambda answers: True, default="no"),
)
"""Questions about a job on Amazon SageMaker."""
