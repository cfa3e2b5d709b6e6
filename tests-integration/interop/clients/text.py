"""A tokenizer of 32 words and sentences of them, for the clients of trl."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(29))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def sentence(seed: int, length: int = 6) -> str:
    """Return words that follow from the seed."""
    return " ".join(WORDS[3 + (seed * 7 + step * (seed % 5 + 1)) % 29] for step in range(length))


def preferences(count: int = 8) -> list[dict[str, str]]:
    """Return prompts, each with a better and a worse answer."""
    return [
        {"prompt": sentence(seed, 3), "chosen": " " + sentence(seed + 9), "rejected": " " + sentence(seed + 4)}
        for seed in range(count)
    ]
