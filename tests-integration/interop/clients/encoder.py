"""sentence-transformers: encoding, and training."""

import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from models import CPU, WORLD, report, trained
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import modules as parts
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

FOLDER = f"bert-{os.environ.get('RANK', '0')}"
SENTENCES = ["w1 w2 w3", "w4 w5", "w1 w9 w9 w2", "w7 w3", "w5 w5 w1", "w8 w2 w6"]


def made() -> SentenceTransformer:
    """Return an encoder with the weights that were saved."""
    torch.manual_seed(0)
    return SentenceTransformer(
        modules=[parts.Transformer(FOLDER), parts.Pooling(16)],
        device="cpu" if CPU else os.environ["ACCELERATE_TORCH_DEVICE"],
    )


def save_model() -> None:
    """Save a small model and its tokenizer."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(20))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(FOLDER)
    torch.manual_seed(0)
    BertModel(
        BertConfig(vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    ).save_pretrained(FOLDER)


def _encode() -> dict[str, Any]:
    vectors = made().encode(SENTENCES[:3], batch_size=2)
    return {"shape": list(vectors.shape), "sum": float(abs(vectors).sum())}


def _train(name: str, loss: Any, columns: dict[str, list[Any]], resume: str | None = None) -> dict[str, Any]:
    """Train four steps with a checkpoint after two, or the last two from that one."""
    set_seed(7)
    model = made()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=name, per_device_train_batch_size=2 // WORLD, max_steps=4, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=CPU, save_strategy="steps", save_steps=2, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict(columns)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss(model))
    trainer.train(resume_from_checkpoint=resume)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    files = sorted(str(path) for path in Path(name).rglob("*") if path.is_file())
    return {"losses": losses, "files": files, **trained(model)}


if __name__ == "__main__":
    save_model()
    results = {"encode": _encode()}
    pairs: dict[str, list[Any]] = {"first": SENTENCES, "second": SENTENCES[::-1]}
    scored = {**pairs, "score": [0.1, 0.9, 0.5, 0.5, 0.9, 0.1]}
    results["similarity"] = _train("similarity", CosineSimilarityLoss, scored)
    results["ranking"] = _train("ranking", MultipleNegativesRankingLoss, pairs)
    results["resumed"] = _train("ranking", MultipleNegativesRankingLoss, pairs, resume="ranking/checkpoint-2")
    report(results)
