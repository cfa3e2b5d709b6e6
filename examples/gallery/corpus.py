"""Text that is on every machine with Python, and a small transformer that reads it byte by byte."""

import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator

LENGTH = 64
MASK = 127  # a byte that occurs in no text


def prose(size: int = 200_000) -> Tensor:
    """Return the beginning of Python's reference manual, which `help()` shows, as numbers of ASCII characters."""
    return _bytes("\n\n".join(pydoc_data.topics.topics.values()), size)


def code(size: int = 200_000) -> Tensor:
    """Return the beginning of the source of Python's package `email`, as numbers of ASCII characters."""
    import email

    files = sorted(Path(email.__path__[0]).glob("*.py"))
    return _bytes("\n".join(file.read_text(encoding="utf-8") for file in files), size)


def _bytes(text: str, size: int) -> Tensor:
    return torch.frombuffer(bytearray(text.encode("ascii", "ignore")[:size]), dtype=torch.uint8).long()


def windows(text: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Cut a text into windows of `LENGTH` + 1 characters: the last tenth to test with, the others to train with."""
    cut = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    border = len(cut) * 9 // 10
    return TensorDataset(cut[:border]), TensorDataset(cut[border:])


class Transformer(nn.Module):
    """Reads a window of characters and gives each place a score for each character.

    Args:
        causal: Whether a place sees only what stands before it.
        width: Size of a character's features.
        depth: Number of layers.
    """

    def __init__(self, causal: bool = True, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.causal = causal
        self.characters = nn.Embedding(128, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, text: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return scores of shape (batch, length, 128) for characters of shape (batch, length), or their mean loss.

        Args:
            text: Numbers of characters.
            labels: Those that are right; with them, the mean loss is returned, in nats.
        """
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x, self.causal)
        scores: Tensor = self.head(self.norm(x))
        return scores if labels is None else nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    """Attention and two linear layers, each beside a way around it."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        """Map features of shape (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.after(x))))


def next_character_loss(model: nn.Module, window: Tensor) -> Tensor:
    """Return the mean loss, in nats, of predicting each character of a window from those before it."""
    loss: Tensor = model(window[:, :-1], labels=window[:, 1:])  # in the model: a pipeline's last stage computes it
    return loss


@torch.no_grad()
def test_loss(accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[Tensor]]) -> float:
    """Return the mean loss over all windows of a prepared loader, each counted once."""
    model.eval()
    found = []
    for (window,) in loader:
        scores = model(window[:, :-1])
        losses = nn.functional.cross_entropy(scores.transpose(1, 2), window[:, 1:], reduction="none").mean(1)
        found.append(accelerator.gather_for_metrics(losses))  # one number for each window
    model.train()
    return float(torch.cat(found).mean())


@torch.no_grad()
def write_on(model: nn.Module, beginning: str, characters: int) -> str:
    """Return a text with likely characters behind its beginning, the same ones at every call."""
    chance = torch.Generator().manual_seed(len(beginning))
    text = list(beginning.encode("ascii"))
    for _ in range(characters):
        scores = model(torch.tensor([text[-LENGTH:]], device=next(model.parameters()).device))
        text.append(int(torch.multinomial((scores[0, -1] / 0.5).softmax(0).cpu(), 1, generator=chance)))
    return bytes(text).decode("ascii")
