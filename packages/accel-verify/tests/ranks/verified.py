"""A small training with attention, dropout and metrics, and five ways of getting it wrong on several ranks.

`accel verify-parallel` runs one function after the other: `verified.py:sound`, `verified.py:missing_reduction` …
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.random import set_seed

TOKENS, LENGTH, WIDTH = 12, 6, 16


class Attention(nn.Module):
    """Two heads that see what the mask lets them see."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 3 * WIDTH)
        self.outward = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """Mix the positions of each sequence."""
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inward(values).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.outward(mixed.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Reads sequences of tokens and names their class."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.attention = Attention()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return scores."""
        values = self.table(tokens)
        return self.head(self.drop(values + self.attention(values, mask)).mean(1))


class Expert(nn.Module):
    """A block of experts, of which a row uses the one that its first number names."""

    def __init__(self) -> None:
        super().__init__()
        # No list: its parts would be sharded one by one, and ranks have to run the same ones of these.
        self.experts = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in range(3)})

    def forward(self, rows: Tensor) -> Tensor:
        """Add what one expert makes of numbers, and so little that the next block chooses alike."""
        mixed = [self.experts[str(int(row[0]) % 2)](row) for row in rows]
        return rows + torch.stack(mixed).tanh() / 10


class Experts(nn.Module):
    """Four layers, of which each token uses two: what ranks of expert parallel share out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        found = torch.einsum("nw,nkwv->nkv", tokens, self.weight[numbers]).tanh()
        return (found * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """Gives each sequence a score for each class, by experts that a router chooses for its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.router = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 4)
        self.experts, self.head = Experts(), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores."""
        values = self.table(tokens).flatten(0, 1)
        weights, numbers = self.router(values).softmax(-1).topk(2)
        return self.head((values + self.experts(values, numbers, weights)).view(len(tokens), -1, WIDTH).mean(1))


class Whole(torch.optim.Optimizer):
    """Steps along gradients that are scaled by the norm of the whole parameter's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (parameter.grad.norm() + 1e-3) * group["lr"])


class Split(nn.Module):
    """Gives each token a score for each class; its products can be split over ranks, and its sequences too."""

    tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Let each token see those before it."""
        values = self.table(tokens)
        heads = values.unflatten(-1, (2, -1)).transpose(1, 2)
        values = values + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(values + self.down(torch.relu(self.up(values))))


def samples(count: int) -> TensorDataset:
    """Return sequences whose tail is padding, and their classes."""
    tokens = torch.randint(1, TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return TensorDataset(tokens, tokens.sum(1) % 3)


def tagged(count: int) -> TensorDataset:
    """Return sequences, and a class for each of their tokens."""
    tokens = torch.randint(TOKENS, (count, 8), generator=torch.Generator().manual_seed(4))
    return TensorDataset(tokens, tokens.cumsum(1) % 3)


def mask_of(tokens: Tensor) -> Tensor:
    """Return which positions may be seen: those before the padding."""
    return (tokens != 1)[:, None, None, :] | torch.eye(LENGTH, dtype=torch.bool)


FAULTS = (
    "missing reduction",  # the gradients of each rank stay where they are
    "mask dropped",  # attention sees the padding, on several ranks only
    "metrics twice",  # the samples that fill up the last batch are counted
    "equal dropout",  # all ranks draw the same masks
    "stale parameter",  # the optimizer of several ranks holds a parameter that the model does not have
    "stray head",  # a layer that was made after `prepare` is trained by an optimizer that was not prepared
    "scaled",  # the learning rate grows with the number of processes
    "noisy",  # each rank draws noise, beside some that all draw alike
    "noisy, missing reduction",
    "never steps",  # the optimizer was not prepared
)


def fails() -> None:
    """Fail before anything."""
    raise KeyError("mine")


def fails_on_ranks() -> None:
    """Fail where there are several ranks."""
    if Accelerator().use_distributed:
        raise KeyError("ours")
    train()


def begun(
    made: Callable[[], nn.Module], kind: Callable[..., torch.optim.Optimizer], loader: Any, **given: Any
) -> tuple[Accelerator, Any, Any, Any]:
    """Return a run, and a model from a seed, its optimizer and a loader, prepared."""
    accelerator = Accelerator(**given)
    set_seed(5)
    net = made()
    return accelerator, *accelerator.prepare(net, kind(net.parameters()), loader)


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """Take a step along clipped gradients."""
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def split() -> None:
    """Train a model that fits every mesh: each rank has its part of tokens, products and parameters."""
    loader: Any = DataLoader(tagged(16), batch_size=2, shuffle=True)
    accelerator, model, optimizer, loader = begun(Split, partial(torch.optim.AdamW, lr=1e-2), loader)
    for tokens, labels in loader:
        buffers = [tokens, labels]
        with accelerator.maybe_context_parallel(buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            accelerator.backward(loss, weight=labels.numel())
        step(accelerator, model, optimizer)


def shared() -> None:
    """Train a Llama of transformers on text, whose sequences ranks may share."""
    warnings.filterwarnings("ignore", r"`?torch\.distributed[\w.]+`? is deprecated", FutureWarning)  # DeepSpeed's calls
    transformers = importlib.import_module("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    text = torch.tensor(list(__doc__.encode()[:128])).view(8, 16)  # type: ignore[union-attr]
    rows = [{"input_ids": row, "labels": row} for row in text]
    loader: Any = DataLoader(rows, batch_size=2, shuffle=True)
    made, kind = partial(transformers.LlamaForCausalLM, config), partial(torch.optim.AdamW, lr=1e-2)
    accelerator, model, optimizer, loader = begun(made, kind, loader)
    for batch in loader:
        labels = batch.pop("labels", None)
        shifted = batch.pop("shift_labels") if labels is None else F.pad(labels[:, 1:], (0, 1), value=-100)
        scores = model(**batch).logits.flatten(0, 1)
        loss = F.cross_entropy(scores, shifted.flatten(), reduction="sum")
        accelerator.backward(loss, weight=(shifted != -100).sum())
        step(accelerator, model, optimizer)


def mixture() -> None:
    """Train a mixture of experts, which ranks may share out."""
    loader: Any = DataLoader(samples(32), batch_size=2, shuffle=True)
    accelerator, model, optimizer, loader = begun(Mixture, partial(torch.optim.SGD, lr=0.5), loader)
    for tokens, classes in loader:
        accelerator.backward(F.cross_entropy(model(tokens), classes))
        step(accelerator, model, optimizer)


def mixture_wrong_weight() -> None:
    """Multiply what comes back from experts by weights that are a little wrong."""
    _sent(lambda weights: weights * 1.01)


def mixture_dropped_token() -> None:
    """Drop what the experts of a rank's last token make of it."""
    _sent(lambda weights: torch.cat([weights[:-1], torch.zeros_like(weights[-1:])]))


def _sent(fault: Callable[[Tensor], Tensor]) -> None:
    """Train a mixture whose tokens are sent to their experts wrongly."""
    parallel = importlib.import_module("accel_parallel.experts.parallel")
    right = parallel.dispatch
    parallel.dispatch = lambda tokens, numbers, weights, **given: right(tokens, numbers, fault(weights), **given)
    mixture()


class Layers(nn.Module):
    """Layers that ranks may share out, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss."""
        for block in self.blocks:
            values = values + torch.tanh(block(values))
        return {"loss": F.cross_entropy(self.head(values), labels)}


def layers() -> None:
    """Train layers, which ranks may share out."""
    values = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(6))
    loader: Any = DataLoader(TensorDataset(values, torch.arange(32) % 3), batch_size=8)
    accelerator, model, optimizer, loader = begun(Layers, partial(torch.optim.SGD, lr=0.5), loader)
    for values, labels in loader:
        accelerator.backward(model(values, labels)["loss"])
        step(accelerator, model, optimizer)


def layers_swapped_labels() -> None:
    """Give two micro-batches of a pipeline each other's labels."""
    pipeline = importlib.import_module("accel_parallel.pipeline.run")
    right = pipeline.divide

    def swapped(batch: Any, parts: int, **given: Any) -> Any:
        (first, second, *rest), counts = right(batch, parts, **given)
        one, other = ((first[0][0], second[0][1]), first[1]), ((second[0][0], first[0][1]), second[1])
        return [one, other, *rest], counts

    pipeline.divide = swapped
    layers()


def experts() -> None:
    """Train experts that rows choose, so that ranks use different ones in each step."""
    branches(torch.optim.AdamW)


def hooked() -> None:
    """Train them with a hook on a parameter of each."""
    branches(torch.optim.AdamW, hooks=True)


def factored() -> None:
    """Train them with an optimizer of torch that looks at whole matrices."""
    branches(torch.optim.Adafactor)


def whole() -> None:
    """Train them with an optimizer of one's own that does."""
    branches(Whole)


def branches(kind: Callable[..., torch.optim.Optimizer], *, hooks: bool = False) -> None:
    """Train blocks of experts; of two ranks, one reads the even rows of the data and the other one the odd ones."""
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    set_seed(5)
    net = nn.Sequential(Expert(), Expert(), nn.Linear(4, 1))
    for block in (net[0], net[1]) if hooks else ():
        block.experts["0"].weight.register_hook(lambda gradient: 2 * gradient)
    rows = torch.arange(16.0)[:, None] + torch.linspace(0.4, 0.6, 4)
    model, optimizer, loader = accelerator.prepare(net, kind(net.parameters()), DataLoader(rows))
    for batch in loader:
        accelerator.backward(model(batch).square().mean() / 100)
        optimizer.step()
        optimizer.zero_grad()


def train(fault: str = "") -> None:
    """Train for two epochs, and test after each."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(5)
    net = Net()
    rate = 1e-2 * (accelerator.num_processes if fault == "scaled" else 1)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(samples(32), batch_size=2, shuffle=True)
    model, loader, test = accelerator.prepare(net, loader, DataLoader(samples(11), batch_size=2))
    if fault != "never steps":
        optimizer, schedule = accelerator.prepare(optimizer, schedule)
    if fault != "equal dropout":
        set_seed(5, device_specific=True)
    if fault == "stale parameter" and accelerator.use_distributed:
        held = optimizer.param_groups[0]["params"]
        held[-1] = nn.Parameter(held[-1].detach().clone())
    for _ in range(2):
        epoch(accelerator, model, loader, optimizer, schedule, fault)
        evaluate(accelerator, model, test, fault)


def epoch(accelerator, model, loader, optimizer, schedule, fault: str) -> None:  # type: ignore[no-untyped-def]
    """Train for one epoch."""
    model.train()
    head = nn.utils.skip_init(nn.Linear, 3, 3)  # draws no random numbers
    nn.init.eye_(head.weight)
    nn.init.zeros_(head.bias)
    other = torch.optim.SGD(head.parameters(), lr=0.1)
    for tokens, classes in loader:
        unsynchronized = accelerator.no_sync(model) if "missing reduction" in fault else nullcontext()
        with accelerator.accumulate(model), unsynchronized:
            mask = None if fault == "mask dropped" and accelerator.use_distributed else mask_of(tokens)
            scores = model(tokens, mask)
            scores = head(scores) if fault == "stray head" else scores
            if "noisy" in fault:
                alike = torch.randn(3, generator=torch.Generator().manual_seed(1))
                scores = scores + alike + torch.randn_like(scores)
            accelerator.backward(F.cross_entropy(scores, classes))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                other.step()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def evaluate(accelerator, model, test, fault: str) -> None:  # type: ignore[no-untyped-def]
    """Count the samples that are classified rightly."""
    model.eval()
    gather = accelerator.gather if fault == "metrics twice" else accelerator.gather_for_metrics
    for tokens, classes in test:
        with torch.no_grad():
            gather(model(tokens, mask_of(tokens)).argmax(1) == classes)


sound = train
globals().update({fault.replace(", ", "_and_").replace(" ", "_"): partial(train, fault) for fault in FAULTS})
