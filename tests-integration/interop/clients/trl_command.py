"""trl's own command line: `trl sft` and `trl dpo` on a model, a tokenizer and data in local folders."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from models import digest, llama, report
from text import preferences, sentence, tokenizer
from transformers import AutoModelForCausalLM

STEPS = 3


def _folder(name: str, rows: list[dict[str, str]]) -> Path:
    folder = Path(name)
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _trl(word: str, data: Path, *more: str) -> dict[str, Any]:
    """Run one of trl's commands and read what it left: the log of its losses, and the model."""
    words = [
        word, "--model_name_or_path", "model", "--dataset_name", str(data), "--output_dir", word,
        "--per_device_train_batch_size", "2", "--max_steps", str(STEPS), "--learning_rate", "1e-2",
        "--logging_steps", "1", "--report_to", "none", "--use_cpu", "true", "--bf16", "false",
        "--gradient_checkpointing", "false", "--save_strategy", "steps", "--save_steps", str(STEPS),
        "--disable_tqdm", "true", "--dtype", "float32", "--seed", "7", *more,
        "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--cpu",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "trl.cli.main", *words], check=True, stdout=sys.stderr)
    state = json.loads((Path(word) / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    losses = [row["loss"] for row in state["log_history"] if "loss" in row]
    return {
        "losses": losses,
        "finite": len(losses) == STEPS and all(map(math.isfinite, losses)),
        "weights": digest(AutoModelForCausalLM.from_pretrained(word)),
    }


if __name__ == "__main__":
    llama().save_pretrained("model")
    tokenizer().save_pretrained("model")
    texts = _folder("texts", [{"text": sentence(seed)} for seed in range(8)])
    pairs = _folder("pairs", preferences())
    report({"sft": _trl("sft", texts, "--max_length", "8"), "dpo": _trl("dpo", pairs, "--max_length", "16")})
