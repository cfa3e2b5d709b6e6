"""What is seen of the forward pass: outputs of modules, masks of attention, the random numbers that dropout would draw.

Dropout lets everything through while a script is verified: one process cannot draw the masks that several ranks draw,
for each of them draws its own. Instead, that they do is checked by the state of their generators.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accel_core._torch import compiles_itself
from accel_core.host.availability import has_module
from accel_core.modules.unwrap import canonical_name
from accel_verify.parallel.values import first_tensor, generator_state, sums
from accel_verify.patch import replace

_DROPOUT = {"dropout": 0.5, "dropout1d": 0.5, "dropout2d": 0.5, "dropout3d": 0.5, "feature_alpha_dropout": 0.5}
_DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class ForwardWatch:
    """Notes what happens in the forward passes of one optimizer step after the other.

    Attributes:
        outputs: Of the first batch of the first step, for each call of a module its name, class, and the number, sum
            and sum of squares of the elements of its first output, in the order in which calls ended.
        masks: For each call of attention in the step, `causal`, `mask` or `none`.
        seed: A digest of the generator's state where dropout would first draw in the step; `None` without dropout.
        listening: Whether the outputs of modules are noted.
        in_backward: Whether a backward pass runs, in which what is computed may be computed again.
    """

    def __init__(self) -> None:
        self.outputs: list[tuple[str, str, int, float, float]] = []
        self.masks: list[str] = []
        self.seed: str | None = None
        self.listening = True
        self.in_backward = False
        self._handles: list[RemovableHandle] = []
        self._recurrent: list[nn.Module] = []

    def install(self) -> None:
        """Replace dropout and attention of torch by watched versions."""
        if has_module("accel_parallel"):
            # It binds the attention of torch when it is imported, which has to be torch's own.
            importlib.import_module("accel_parallel.context.attention")
        for name, rate in _DROPOUT.items():
            replace(F, name, self._without(getattr(F, name), rate, training=name != "feature_alpha_dropout"))
        replace(F, "alpha_dropout", self._without(F.alpha_dropout, 0.5, training=False))
        replace(F, "scaled_dot_product_attention", self._attention(F.scaled_dot_product_attention))

    def watch(self, model: nn.Module) -> None:
        """Note what the modules of a model return in the first batch; a compiled model is left alone."""
        modules = dict(model.named_modules())
        for module in modules.values():
            if isinstance(module, nn.RNNBase) and module.dropout:
                self._recurrent.append(module)  # cuDNN drops inside the layer, out of reach of the functions below
                module.dropout = 0.0
        # A hook with Python code breaks the graph.
        if any(type(module).__name__ == "OptimizedModule" or compiles_itself(module) for module in modules.values()):
            return
        for name, module in modules.items():
            hook = functools.partial(self._returned, canonical_name(name).removeprefix("module."))
            self._handles.append(module.register_forward_hook(hook))

    def backward_begins(self, models: list[nn.Module]) -> None:
        """Note that a forward pass is over: what is computed from now on is recomputation."""
        self.listening, self.in_backward = False, True
        modules = [module for model in models for module in model.modules()]
        drops = any(isinstance(each, _DROPOUT_MODULES) and each.p > 0 and each.training for each in modules)
        if drops or any(module.training for module in self._recurrent):  # a compiled model does not show its calls
            self._draws(next(models[0].parameters()).device)

    def backward_ended(self) -> None:
        """Note that the next forward pass may come."""
        self.in_backward = False

    def next_step(self) -> None:
        """Begin the record of the next step."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.outputs, self.masks, self.seed = [], [], [], None

    def _returned(self, name: str, module: nn.Module, _: object, output: object) -> None:
        if not self.listening or not module.training:
            return
        tensor = first_tensor(output)
        if tensor is not None:
            self.outputs.append((name, type(module).__name__.removeprefix("FSDP"), *sums(tensor)))

    def _draws(self, device: torch.device) -> None:
        # The first call decides: later draws follow from it.
        if not torch.compiler.is_compiling() and self.seed is None:
            self.seed = generator_state(device)

    def _without(self, original: Callable[..., Tensor], rate: float, *, training: bool) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def let_through(
            input: Tensor,
            p: float = rate,
            training: bool = training,
            inplace: bool = False,
        ) -> Tensor:
            if training and p > 0 and not self.in_backward:
                self._draws(input.device)
            return original(input, p, False, inplace)

        return let_through

    def _attention(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **more: object,
        ) -> Tensor:
            if not self.in_backward and not torch.compiler.is_compiling():
                self.masks.append("causal" if is_causal else "none" if attn_mask is None else "mask")
                if dropout_p > 0:
                    self._draws(query.device)
            return original(query, key, value, attn_mask, 0.0, is_causal, **more)

        return attention
