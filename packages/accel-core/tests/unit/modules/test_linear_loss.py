"""Losses of heads that are more than a linear layer, against whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from accel_core.errors import DataError
from accel_core.modules.linear_loss import linear_cross_entropy

WORDS, WIDTH, CHUNK = 23, 8, 7


class Capped(nn.Linear):
    """A head with a forward of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits of less than three."""
        return 3 * torch.tanh(super().forward(hidden) / 3)


class Adapted(nn.Module):
    """A head with an adapter, whose weight is that of the layer inside, as PEFT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WORDS)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WORDS, bias=False)

    @property
    def weight(self) -> Tensor:
        """The weight without the adapter."""
        return self.base.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits of both."""
        logits: Tensor = self.base(hidden) + self.up(self.down(hidden))
        return logits


def replaced(linear: nn.Linear) -> nn.Linear:
    """Return a head whose forward was replaced, as hooks of offloading do."""
    plain = linear.forward
    linear.forward = lambda hidden: 2 * plain(hidden)  # type: ignore[method-assign]
    return linear


def hooked(register: str, hook: Callable[..., Any]) -> Callable[[], nn.Linear]:
    """Return a function that makes a head with a hook."""

    def make() -> nn.Linear:
        linear = nn.Linear(WIDTH, WORDS)
        getattr(linear, register)(hook)
        return linear

    return make


HEADS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(WIDTH, WORDS),
    "own forward": lambda: Capped(WIDTH, WORDS),
    "replaced forward": lambda: replaced(nn.Linear(WIDTH, WORDS)),
    "adapter": Adapted,
    "several layers": lambda: nn.Sequential(nn.Linear(WIDTH, WORDS), nn.Tanh()),
    "hook": hooked("register_forward_hook", lambda module, args, logits: logits * torch.ones(1, 1, WORDS) * 2),
    "hook before": hooked("register_forward_pre_hook", lambda module, args: (args[0] + 1,)),
    "hook of gradients": hooked("register_full_backward_hook", lambda module, into, out: (into[0] * 2,)),
    "parametrized": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WORDS)),
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", HEADS)
def test_any_head_has_the_loss_of_its_logits_in_one_piece(kind: str, softcap: float | None) -> None:
    """Values and gradients are those of whole logits, whatever a head does; some tokens do not count."""
    hidden, labels = torch.randn(3, 20, WIDTH), torch.randint(WORDS, (3, 20))
    labels[:, :2] = -100
    losses, gradients = [], []
    for chunked in (False, True):
        torch.manual_seed(0)
        head, given = HEADS[kind](), hidden.clone().requires_grad_()
        if chunked:
            loss = linear_cross_entropy(
                given, head, labels, ignore_index=-100, reduction="mean", softcap=softcap, chunk=CHUNK
            )
        else:
            logits = head(given)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        gradients.append([given.grad, *(each.grad for each in head.parameters())])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6)


def test_a_head_is_called_on_some_rows_at_a_time() -> None:
    """No call, in forward or once more for the gradients, has more tokens than asked for; bad labels are refused."""
    seen: list[int] = []
    head = nn.Sequential(nn.Linear(WIDTH, WORDS), nn.Tanh())
    head.register_forward_hook(lambda module, args, logits: seen.append(logits[..., 0].numel()))
    how: dict[str, Any] = {"ignore_index": -100, "reduction": "sum", "softcap": None, "chunk": CHUNK}
    hidden, labels = torch.randn(3, 20, WIDTH, requires_grad=True), torch.randint(WORDS, (3, 20))
    linear_cross_entropy(hidden, head, labels, **how).backward()  # type: ignore[no-untyped-call]
    assert max(seen) == CHUNK
    assert sum(seen) == 2 * labels.numel()
    labels[1, 3] = WORDS
    with pytest.raises(DataError, match=rf"from 0 to {WORDS - 1}, .*got {WORDS}"):
        linear_cross_entropy(hidden, head, labels, **how)
