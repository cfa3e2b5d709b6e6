"""trl's trainers, and in one process its way of launching, on a model and a tokenizer built on the spot."""

import contextlib
import io
import math
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from models import WORLD, llama, logged, report, settings, trained
from text import preferences, sentence, tokenizer
from transformers import LlamaForSequenceClassification, set_seed
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


def _arguments(kind: Any, name: str, **others: Any) -> Any:
    plain = {"bf16": False, "gradient_checkpointing": False, "dataset_num_proc": None}
    return kind(**settings(name, per_device_train_batch_size=2 // WORLD, max_steps=3, **plain, **others))


def _result(trainer: Any) -> dict[str, Any]:
    trainer.train()
    found = logged(trainer, losses="loss")
    return {**found, "finite": all(map(math.isfinite, found["losses"])), **trained(trainer.model)}


def _sft() -> dict[str, Any]:
    set_seed(7)
    data = Dataset.from_list([{"text": sentence(seed)} for seed in range(8)])
    return _result(
        SFTTrainer(
            model=llama(), args=_arguments(SFTConfig, "sft", max_length=8), train_dataset=data,
            processing_class=tokenizer(),
        )
    )  # fmt: skip


def _dpo() -> dict[str, Any]:
    set_seed(7)
    return _result(
        DPOTrainer(
            model=llama(), ref_model=llama(), args=_arguments(DPOConfig, "dpo", max_length=16),
            train_dataset=Dataset.from_list(preferences()), processing_class=tokenizer(),
        )
    )  # fmt: skip


def _reward() -> dict[str, Any]:
    set_seed(7)
    base = llama()
    base.config.num_labels = 1
    model = LlamaForSequenceClassification(base.config)
    rows = [{"chosen": sentence(seed + 9), "rejected": sentence(seed + 4)} for seed in range(8)]
    return _result(
        RewardTrainer(
            model=model, args=_arguments(RewardConfig, "reward", max_length=8),
            train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        )
    )  # fmt: skip


def _in_process() -> dict[str, Any]:
    """Launch a script the way trl's command line does: in process, with its parser."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    Path("script.py").write_text("import os\nprint(os.environ['ACCELERATE_MIXED_PRECISION'])\n")
    words = ["--num_processes", "1", "--mixed_precision", "no", "--cpu", "script.py", "--word", "1"]
    args = launch_command_parser().parse_args(words)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        launch_command(args)
    sys.stdout.flush()
    return {"script": args.training_script, "words": args.training_script_args}


if __name__ == "__main__":
    found = {"sft": _sft(), "dpo": _dpo(), "reward": _reward()}
    report(found if WORLD > 1 else {**found, "in process": _in_process()})
