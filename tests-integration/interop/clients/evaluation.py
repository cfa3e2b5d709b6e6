"""Encoding with sentence-transformers, and an evaluation loop as lm-eval writes it."""

from typing import Any

import torch
from models import llama, report, sequences
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from accelerate import Accelerator, find_executable_batch_size
from accelerate.utils import gather_object


def _encode() -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer, models

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(20))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained("bert")
    torch.manual_seed(0)
    BertModel(
        BertConfig(vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    ).save_pretrained("bert")
    transformer = models.Transformer("bert")
    encoder = SentenceTransformer(modules=[transformer, models.Pooling(16)], device="cpu")
    vectors = encoder.encode(["w1 w2 w3", "w4 w5", "w1 w9 w9 w2"], batch_size=2)
    return {"shape": list(vectors.shape), "sum": float(abs(vectors).sum())}


def _likelihoods() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(llama(), evaluation_mode=True).eval()
    rows = sequences(9)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)  # type: ignore[untyped-decorator]
    def score(batch_size: int) -> list[float]:
        tried.append(batch_size)
        if batch_size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        scores: list[float] = []
        for start in range(0, len(rows), batch_size):
            tokens = torch.stack([row["input_ids"] for row in rows[start : start + batch_size]])
            with torch.no_grad():
                logits = model(input_ids=tokens).logits.log_softmax(-1)
            picked = logits[:, :-1].gather(-1, tokens[:, 1:, None]).sum((1, 2))
            scores += picked.tolist()
        return scores

    found = gather_object([(index, value) for index, value in enumerate(score())])
    return {"scores": [value for _, value in sorted(found)], "tried": tried}


def main() -> None:
    """Run every case and print what came out."""
    report({"encode": _encode(), "likelihoods": _likelihoods()})


if __name__ == "__main__":
    main()
