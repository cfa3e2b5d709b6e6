"""Experts of a mixture that come one by one compute what they compute in memory, and bring only what was chosen."""

import copy
import gc
import io
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    align_module_device,
    dispatch_model,
    get_state_dict_offloaded_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from accel_bigmodel.experts.cache import ExpertCache
from accel_core.errors import CheckpointMismatchError, ConfigurationError, OffloadError
from accel_testing import limits, requires

WIDTH, COUNT, CHOICES, LAYERS = 16, 6, 3, 3
ONE = 2 * WIDTH * 2 * WIDTH * 4
"""Bytes of one expert."""


class Experts(nn.Module):
    """Experts as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = COUNT
        self.up = nn.Parameter(torch.randn(COUNT, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, 2 * WIDTH) / 4)

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum what the chosen experts make of each token, one expert after the other."""
        output = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            choice, rows = torch.where((numbers == number).T)
            if len(rows):
                made = torch.relu(tokens[rows] @ self.up[number].T) @ self.down[number].T
                output = output.index_add(0, rows, made * weights[rows, choice, None])
        return output


class Mixture(nn.Module):
    """A layer that adds a mixture of experts to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT)
        self.experts = Experts()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Route tokens (tokens, width) to their experts."""
        weights, numbers = self.router(tokens).softmax(-1).topk(CHOICES, -1)
        return tokens + self.experts(tokens, numbers, weights)


def mixtures() -> nn.Sequential:
    """Make a model of mixtures, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*[Mixture() for _ in range(LAYERS)], nn.Linear(WIDTH, 2))


DISK = {
    name: device
    for number in range(LAYERS)
    for name, device in ((f"{number}.router", "cpu"), (f"{number}.experts", "disk"))
} | {str(LAYERS): "cpu"}


def loader(made: Callable[[], nn.Module], folder: Path) -> Callable[..., Any]:
    """Save a model; return what loads it with a cache of a size, its experts left in their file."""
    torch.manual_seed(0)
    save_file({name: value.clone() for name, value in made().state_dict().items()}, folder / "model.safetensors")

    def load(size: int | str | None = "1MiB", device_map: Any = "auto", **arguments: Any) -> Any:
        with init_empty_weights():
            model = made()
        return load_checkpoint_and_dispatch(model, folder, device_map=device_map, expert_cache=size, **arguments)

    return load


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """Return what loads the model of mixtures."""
    return loader(mixtures, tmp_path)


@pytest.fixture
def whole(load: Callable[..., Any]) -> Any:
    """Load the model into memory: kernels for a single row round by where weights lie in it."""
    return load(None, {"": "cpu"})


TOKENS = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))


def chosen(model: nn.Module, tokens: torch.Tensor) -> list[int]:
    """Return how many experts of each layer some token chooses."""
    found = []
    for layer in list(model)[:LAYERS]:  # type: ignore[call-overload]
        found.append(layer.router(tokens).topk(CHOICES, -1).indices.unique().numel())
        tokens = layer(tokens)
    return found


@pytest.mark.parametrize(
    ("size", "mode"),
    [(ONE, torch.inference_mode), (2 * ONE, torch.no_grad), (4 * ONE + 1, torch.enable_grad), ("1MiB", torch.no_grad)],
)
def test_outputs_are_those_in_memory(
    load: Callable[..., Any], whole: Any, size: int | str, mode: Callable[..., object]
) -> None:
    """Bit for bit, whatever the cache holds, forward after forward."""
    model = load(size)
    with mode():
        for tokens in (TOKENS, TOKENS[:0], TOKENS[3:9], TOKENS[:1]):
            assert torch.equal(model(tokens), whole(tokens))
    report = model.expert_report()
    assert 0 < report.held <= report.budget
    assert report.held % ONE == 0


def test_only_chosen_experts_are_read_once(load: Callable[..., Any]) -> None:
    """Bytes from disk are those of the distinct experts that were chosen; a second forward reads nothing."""
    model = load()
    assert math.isnan(model.expert_report().hit_rate), "not known before the first"
    asked = chosen(mixtures(), TOKENS[:1])
    with torch.no_grad():
        model(TOKENS[:1])
        first = model.expert_report()
        model(TOKENS[:1])
    again = model.expert_report()
    assert (first.hits, first.misses, first.from_disk, first.from_host) == (0, sum(asked), sum(asked) * ONE, 0)
    assert (again.hits, again.misses, again.from_disk) == (sum(asked), sum(asked), first.from_disk)
    assert again.hit_rate == 0.5
    assert list(again.experts.values()) == [COUNT] * LAYERS
    assert again.bytes_per_token() == first.from_disk / 2
    assert {name: sum(numbers.values()) for name, numbers in again.chosen.items()} == {
        f"{number}.experts": 2 * count for number, count in enumerate(asked)
    }


def test_dense_parts_train_through_experts_that_are_away(load: Callable[..., Any], whole: Any) -> None:
    """Routers get the gradients that they get in memory; experts that should train are refused by name."""
    model = load()
    for each in (whole, model):
        for layer in list(each)[:LAYERS]:  # type: ignore[call-overload]
            layer.experts.requires_grad_(False)
        each(TOKENS).sum().backward()
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
    with pytest.raises(OffloadError, match="offloaded weight"):
        load()(TOKENS).sum().backward()


def test_threads_share_the_cache(load: Callable[..., Any], whole: Any) -> None:
    """Forwards on several threads, with a cache that is too small for one of them, do not mix."""
    model = load(2 * ONE)
    inputs = [TOKENS[start : start + 5] for start in range(8)]
    found: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        with torch.no_grad():
            found[number] = model(inputs[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, tokens in enumerate(inputs):
        assert torch.equal(found[number], whole(tokens))
    assert model.expert_report().held <= 2 * ONE


def test_casts_and_changed_files_are_noticed(load: Callable[..., Any], whole: Any, tmp_path: Path) -> None:
    """Weights in the cache are not used once the model was cast, or the file overwritten."""
    model = load()
    with torch.no_grad():
        model(TOKENS)
        model.double()
        assert torch.allclose(model(TOKENS.double()), whole.double()(TOKENS.double()), atol=1e-12)
        path = tmp_path / "model.safetensors"
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.write(content + b" ")
        with pytest.raises(OffloadError, match="changed after the model was dispatched"):
            model(TOKENS.double())


def test_weights_that_somebody_put_there_are_computed_with(load: Callable[..., Any], whole: Any) -> None:
    """Those of `functional_call` and of `align_module_device`, inside of it and after; inputs may have names."""
    model = load()
    swapped = {"0.experts.up": torch.full((COUNT, 2 * WIDTH, WIDTH), 0.1)}
    call = torch.func.functional_call
    with torch.no_grad():
        wanted = whole(TOKENS)
        assert torch.equal(call(model, swapped, TOKENS), call(whole, swapped, TOKENS))
        assert torch.equal(model(TOKENS), wanted)
        for each in (whole, model):
            with align_module_device(each[0].experts):
                each[0].experts.up.mul_(2)
                inside = each(TOKENS)
        assert torch.equal(inside, whole(TOKENS))
        assert not torch.equal(inside, wanted)
        torch.testing.assert_close(model(TOKENS), inside)  # what was written lies elsewhere: a row rounds by where
        weights, numbers = whole[0].router(TOKENS).softmax(-1).topk(CHOICES, -1)
        named = {"weights": weights, "numbers": numbers}
        assert torch.equal(model[0].experts(TOKENS, **named), whole[0].experts(TOKENS, **named))


def test_experts_in_memory_come_from_there() -> None:
    """With a main device of its own, experts on the CPU are copied one by one, and once more where they changed."""
    whole, held = mixtures(), dict(mixtures().state_dict())
    places = {name: "cpu" if name.endswith("experts") else "meta" for name in DISK}
    model = dispatch_model(mixtures(), places, main_device="meta", state_dict=held, expert_cache="1MiB")
    model[0].experts.__dict__["_hf_hook"].execution_device = "cpu"  # the meta device cannot tell who was chosen
    weights, numbers = whole[0].router(TOKENS).softmax(-1).topk(CHOICES, -1)
    with torch.no_grad():
        expected = whole[0].experts(TOKENS, numbers, weights)
        assert torch.equal(model[0].experts(TOKENS, numbers, weights), expected)
        report = model.expert_report()
        assert report.from_disk == 0
        assert report.from_host == report.held > 0
        held["0.experts.down"].mul_(2)
        assert torch.equal(model[0].experts(TOKENS, numbers, weights), 2 * expected)


def test_copies_pickles_and_removal(load: Callable[..., Any], whole: Any) -> None:
    """A copy and a pickle have caches of their own; without hooks, the model is as it was."""
    model = load()
    with torch.no_grad():
        model(TOKENS)
        copied = copy.deepcopy(model)
        assert copied.expert_report().held == 0
        assert torch.equal(copied(TOKENS), whole(TOKENS))
        stream = io.BytesIO()
        pickle.dump(model, stream)
        stream.seek(0)
        assert torch.equal(pickle.load(stream)(TOKENS), whole(TOKENS))
        state = get_state_dict_offloaded_model(model)
        assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
    remove_hook_from_submodules(model)
    assert type(model[0].experts.forward).__name__ == "method"


@pytest.mark.parametrize(
    ("size", "device_map", "text"),
    [
        (ONE - 1, DISK, r"holds at least one; got expert_cache=4095"),
        ("1MiB", {"": "cpu"}, "stay in memory"),
        ("many", DISK, "size"),
        (-1, DISK, "got -1"),
    ],
)
def test_caches_that_do_not_fit_are_refused(
    load: Callable[..., Any], size: int | str, device_map: object, text: str
) -> None:
    """By name, before the model is changed, and so is a cache of experts where there are none."""
    with pytest.raises(ConfigurationError, match=text):
        load(size, device_map)
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="no experts were found"):
        dispatch_model(model, {"": "disk"}, expert_cache="1MiB")
    assert "_hf_hook" not in model.__dict__


def test_a_stack_of_another_count_is_refused(load: Callable[..., Any], tmp_path: Path) -> None:
    """A checkpoint with more experts than the model, a map with fewer, and a router that names one more."""
    state = dict(mixtures().state_dict())
    with torch.no_grad():
        model = load()
        with pytest.raises(OffloadError, match=r"6 to 6 for 6 experts of 0\.experts"):
            model[0].experts(TOKENS[:2], torch.full((2, 1), COUNT), torch.ones(2, 1))
        hook = model[0].experts.__dict__["_hf_hook"]
        hook.weights_map = {"up": state["0.experts.up"][1:], "down": state["0.experts.down"][1:]}
        with pytest.raises(OffloadError, match=r"got \(5, 32, 16\) for 'up', which has \(6, 32, 16\)"):
            model(TOKENS)
    state["1.experts.down"] = torch.zeros(COUNT + 1, WIDTH, 2 * WIDTH)
    (tmp_path / "model.safetensors").unlink()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"1\.experts\.down"):
        load()


_SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
SHAPES = {
    "MixtralConfig": {"num_local_experts": 8},
    "Qwen3MoeConfig": {"num_experts": 8, "moe_intermediate_size": 8, "head_dim": 8},
    "DeepseekV3Config": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **_LATENT,
    },
    "GptOssConfig": {"num_local_experts": 8, "head_dim": 8},
}


@requires("transformers")
@pytest.mark.parametrize("name", SHAPES)
def test_models_of_transformers_generate_the_same(name: str, tmp_path: Path) -> None:
    """64 tokens for a padded batch, bit for bit with transformers' own loop, in less memory than all experts take."""
    import transformers

    config = getattr(transformers, name)(**_SIZES, **SHAPES[name])

    def made() -> Any:
        return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()

    load = loader(made, tmp_path)
    whole, model = load(None, {"": "cpu"}), load("8KiB", expert_lookahead=True)
    words = torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.inference_mode():
        given = {"attention_mask": mask, "output_router_logits": True}
        wanted, found = whole(words, **given), model(words, **given)
        assert torch.equal(found.logits, wanted.logits)
        for one, other in zip(found.get("router_logits", ()), wanted.get("router_logits", ()), strict=True):
            assert torch.equal(one, other)
        arguments = {"attention_mask": mask, "max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
        wanted = whole.generate(words, **arguments)
        assert wanted.shape[1] > 12
        assert torch.equal(model.generate(words, **arguments), wanted)
    report = model.expert_report()
    assert report.misses > 0
    assert report.held <= 8192
    assert (report.guessed > 0) == (len(report.tokens) > 1)


def test_guesses_change_no_output_and_are_counted(load: Callable[..., Any], whole: Any) -> None:
    """The next router's choice for this layer's tokens is fetched ahead, in evaluation alone, whatever comes of it."""
    for size in (ONE, 3 * ONE, "1MiB"):
        model = load(size, expert_lookahead=True)
        with torch.no_grad():
            model.train()(TOKENS)
            assert model.expert_report().guessed == 0
            model.eval()
            before = model.expert_report()
            right = wrong = 0
            for number in range(6):
                tokens = TOKENS[number : number + 1]
                assert torch.equal(model(tokens), whole(tokens))
                for layer, following in pairwise(whole[:LAYERS]):
                    guess = set(following.router(tokens).topk(CHOICES).indices[0].tolist())
                    tokens = layer(tokens)
                    choice = set(following.router(tokens).topk(CHOICES).indices[0].tolist())
                    right, wrong = right + len(guess & choice), wrong + len(guess - choice)
        report = model.expert_report()
        assert (report.guessed, report.guessed_wrong) == (right, wrong)
        assert right > wrong > 0
        assert report.held <= report.budget
        assert report.from_disk - before.from_disk >= (report.misses - before.misses) * ONE
        assert torch.equal(copy.deepcopy(model)(TOKENS), whole(TOKENS))
    with pytest.raises(ConfigurationError, match="expert_lookahead=True without expert_cache"):
        load(None, {"": "cpu"}, expert_lookahead=True)


def test_a_layer_with_extra_inputs_is_not_run_for_a_guess(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else it takes is not known before it is called."""
    own = Mixture.forward
    monkeypatch.setattr(Mixture, "forward", lambda self, tokens, scale: own(self, tokens) * scale)
    model = load(expert_lookahead=True).eval()
    tokens = TOKENS
    with torch.no_grad():
        for _ in range(2):
            for layer in model[:LAYERS]:
                tokens = layer(tokens, 0.5)
    assert model.expert_report().guessed == model.expert_report().guessed_wrong == 0


def test_a_guess_that_fails_fails_where_the_weights_are_needed(load: Callable[..., Any], tmp_path: Path) -> None:
    """A file that changed raises in the forward that reads it, not in the thread that fetched ahead."""
    model = load("1MiB", expert_lookahead=True).eval()
    with torch.no_grad():
        model(TOKENS[:1])
        os.utime(tmp_path / "model.safetensors", ns=(0, 0))
        with pytest.raises(OffloadError, match="changed after the model was dispatched"):
            model(TOKENS)


def test_an_expert_that_came_takes_its_room_once(load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A full cache stays full, even if the reading thread reports an expert late."""
    arrived = ExpertCache._arrived

    def late(self: ExpertCache, *args: Any) -> None:
        time.sleep(0.05)
        arrived(self, *args)

    monkeypatch.setattr(ExpertCache, "_arrived", late)
    # Another dtype than the file's, so that experts are cast, by a thread.
    model = load(8 * ONE, DISK, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(3):
            model(TOKENS.double())
            assert model.expert_report().held == 8 * ONE


def test_a_budget_changes_while_the_model_runs(load: Callable[..., Any], whole: Any) -> None:
    """A smaller one lets experts go at once, a larger one keeps more; one expert is the least."""
    model = load(4 * ONE)
    stop = threading.Event()
    sizes: list[int] = []

    def resize() -> None:
        while not stop.is_set():
            for count in (1, 7, 3):
                model.expert_cache.resize(count * ONE)
                sizes.append(model.expert_report().held)

    thread = threading.Thread(target=resize)
    thread.start()
    with torch.no_grad():
        found = [model(TOKENS) for _ in range(8)]
    stop.set()
    thread.join()
    assert all(torch.equal(each, whole(TOKENS)) for each in found)
    assert max(sizes) <= 7 * ONE
    model.expert_cache.resize("4KiB")
    assert model.expert_report().held <= ONE
    with pytest.raises(ConfigurationError, match="holds at least one; got expert_cache=4095"):
        model.expert_cache.resize(ONE - 1)
    assert model.expert_report().budget == ONE


def test_pages_are_counted_and_go_with_their_experts(load: Callable[..., Any]) -> None:
    """What the CPU computes with from a file in its dtype is the page cache's memory; a cast copy is not."""
    model = load("1MiB")
    with torch.no_grad():
        model(TOKENS)
        report = model.expert_report()
        assert report.in_pages == report.held > 0
        model.double()
        model(TOKENS.double())
    assert model.expert_report().in_pages == 0


class Listed(nn.Module):
    """A mixture whose experts are modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(COUNT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give each token to its expert."""
        numbers = self.router(tokens).argmax(-1)
        output = tokens.clone()
        for number in numbers.unique().tolist():
            output[numbers == number] += self.experts[number](tokens[numbers == number])
        return output


def test_experts_in_a_list_come_when_they_are_called(tmp_path: Path) -> None:
    """Bit for bit, within the budget, through copies, casts and writes; the report counts calls."""
    load, one = loader(lambda: nn.Sequential(Listed(), Listed()), tmp_path), 4 * (WIDTH**2 + WIDTH)
    whole, model = load(None, {"": "cpu"}), load(2 * one)
    inputs = TOKENS, whole[0](TOKENS)
    asked = sum(layer.router(each).argmax(-1).unique().numel() for layer, each in zip(whole, inputs, strict=True))
    with torch.no_grad():
        assert torch.equal(model(TOKENS), whole(TOKENS))
        report = model.expert_report()
        assert (report.hits, report.misses, report.from_disk) == (0, asked, asked * one)
        assert report.held == 2 * one
        last = max(report.chosen["1.experts"])
        model[1].experts[last](TOKENS)
        assert model.expert_report().hits == 1
        assert torch.equal(copy.deepcopy(model)(TOKENS), whole(TOKENS))
        for each in (whole, model):
            with align_module_device(each[1].experts[last]):
                each[1].experts[last][0].weight.mul_(2)
        torch.testing.assert_close(model(TOKENS), whole(TOKENS))
    with pytest.raises(ConfigurationError, match="holds at least one"):
        load(one - 1)


class OwnForward(nn.ModuleList):
    """Experts in a list that has a forward."""

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Sum what some experts make of all tokens."""
        return torch.stack([self[number](tokens) for number in numbers.tolist()]).sum(0)


class Called(nn.Module):
    """A layer that calls its list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT)
        self.experts = OwnForward(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add what the experts make that all tokens choose together."""
        return tokens + self.experts(tokens, self.router(tokens).sum(0).topk(CHOICES).indices)


@torch.no_grad()
def test_lists_with_a_forward_of_their_own_take_no_guesses(tmp_path: Path) -> None:
    """Their experts come when they are called; asking for guesses changes nothing."""
    load = loader(lambda: nn.Sequential(Called(), Called()).eval(), tmp_path)
    model = load(expert_lookahead=True)
    assert torch.equal(model(TOKENS), load(None, {"": "cpu"})(TOKENS))
    assert model.expert_report().guessed == 0


def test_a_forked_process_reads_experts_itself(load: Callable[..., Any], whole: Any) -> None:
    """The threads that read for its parent are not there: it computes all the same."""
    # Another dtype than the file's, so that experts are cast, by a thread.
    model = load(18 * ONE, DISK, dtype=torch.float64, expert_lookahead=True).eval()
    whole, tokens = whole.double(), TOKENS.double()
    with torch.no_grad():
        for token in tokens[:4]:
            model(token[None])
        assert model.expert_report().guessed > 0
        child = os.fork()
        if child == 0:
            signal.alarm(int(limits.limit()))  # ends what hangs
            status = 1
            try:
                status = int(not all(torch.allclose(model(token[None]), whole(token[None])) for token in tokens[4:]))
            finally:
                os._exit(status)
    assert os.waitpid(child, 0) == (child, 0), "hung, or wrong"
    del model
    gc.collect()  # the cache's thread goes with it
