"""The engine: a model of megatron-core, its optimizer and its schedule, called like a model of transformers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from accel_core.errors import PreparationError
from accel_megatron import batches, library
from accel_megatron.plugin import MegatronLMPlugin
from accel_megatron.run import MegatronRun, current
from accel_megatron.steps import AbstractTrainStep, BertTrainStep, GPTTrainStep, T5TrainStep
from accel_megatron.wrappers import MegatronLMOptimizerWrapper

_logger = logging.getLogger(__name__)

_STEPS: dict[str, Callable[..., AbstractTrainStep]] = {"gpt": GPTTrainStep, "bert": BertTrainStep, "t5": T5TrainStep}
_OUTPUTS = {
    "gpt": "CausalLMOutputWithCrossAttentions",
    "bert": "MaskedLMOutput",
    "t5": "Seq2SeqLMOutput",
}


class StepResult(NamedTuple):
    """The result of a training step."""

    losses: dict[str, torch.Tensor]  # the losses by name, averaged over the data-parallel ranks
    skipped: bool  # whether the update was skipped because of infinite or NaN gradients
    grad_norm: float | None  # norm of all gradients before clipping
    num_zeros_in_grad: int | None  # number of zero gradients, where they are counted


class MegatronEngine(nn.Module):
    """A model with its optimizer and schedule in megatron-core; a call in training mode takes a whole training step.

    Attributes:
        base_model: The first part of the model.
        optimizer: The optimizer of megatron-core, or `None`.
        scheduler: Its schedule, or `None`.
        train_step_handler: The training step: reads batches and computes losses.
        iteration: Number of training steps taken.
        consumed_samples: Number of samples trained on, over all ranks.
        last: Result of the last training step.
        datasets: Iterators over megatron-core datasets, whose positions are saved with the engine.
        wrapper: The wrapper that users see in place of the optimizer.
        loss: The loss that the last call returned.
    """

    def __init__(
        self, accelerator: object, model: nn.Module | Sequence[nn.Module], optimizer: Any, scheduler: Any
    ) -> None:
        super().__init__()
        self.module = nn.ModuleList([model] if isinstance(model, nn.Module) else model)
        self.base_model: Any = self.module[0]
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.iteration = 0
        self.consumed_samples = 0
        self.last: StepResult | None = None
        self.datasets: list[Any] = []  # their positions are saved with the run
        self.wrapper: MegatronLMOptimizerWrapper | None = None
        self.loss: torch.Tensor | None = None
        self._run = current()
        self._logits: torch.Tensor | None = None
        self._names: list[str] | None = None
        self._eval_losses: dict[str, torch.Tensor] = {}
        self.train_step_handler = _step(accelerator, self._run)
        self.config: Any = library.core("utils").get_model_config(self.base_model)
        self._connect()

    def _connect(self) -> None:
        """Tell megatron-core's schedules how gradients are scaled, exchanged and finalized."""
        parallel = library.core("distributed")
        self.config.finalize_model_grads_func = parallel.finalize_model_grads
        if self.optimizer is not None:
            self.config.grad_scale_func = self.optimizer.scale_loss
        first = self.base_model
        if isinstance(first, parallel.DistributedDataParallel) and first.ddp_config.overlap_grad_reduce:
            several = len(self.module) > 1
            self.config.no_sync_func = [part.no_sync for part in self.module] if several else first.no_sync

    def get_module_config(self) -> Any:
        """Return megatron-core's configuration of the model's layers."""
        return self.config

    def train(self, mode: bool = True) -> MegatronEngine:
        """Set the training mode."""
        super().train(mode)
        return self

    def eval(self) -> MegatronEngine:
        """Set the evaluation mode."""
        return self.train(False)

    def get_batch_data_iterator(self, batch_data: Mapping[str, Any]) -> Any:
        """Return an iterator over the micro batches of a batch; with virtual stages, one for each.

        Raises:
            DataError: The batch does not split into micro batches.
        """
        batches.check(self._run, batch_data)
        parts = list(batches.micro_batches(self._run, batch_data))
        iterators = [iter(parts) for _ in self.module]  # each virtual stage reads all micro batches
        return iterators if len(iterators) > 1 else iterators[0]

    def train_step(self, **batch_data: object) -> StepResult:
        """Take a training step: gradients of all micro batches, the update, and a step of the schedule.

        Raises:
            DataError: The batch does not split into micro batches.
            PreparationError: The engine was prepared without an optimizer.
        """
        if self.optimizer is None:
            raise PreparationError(
                "A training step needs an optimizer; got an engine without one. Call `accelerator.prepare(model, "
                "optimizer)`, or model.eval()."
            )
        iterator = self.get_batch_data_iterator(batch_data)
        for part in self.module:
            # Gradients add up in the wrapper's buffers, which the optimizer does not clear.
            part.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        losses = self._run_schedule(iterator, batch_data, forward_only=False)
        updated, norm, zeros = self.optimizer.step()
        samples = batches.check(self._run, batch_data) * self._run.layout.replicas
        if updated and self.scheduler is not None:  # a skipped step must not move the learning rate
            self.scheduler.step(increment=samples)
        if self.wrapper is not None:
            self.wrapper.skipped = not updated
        self.iteration += 1
        self.consumed_samples += samples
        self.last = StepResult(losses, not updated, None if norm is None else float(norm), zeros)
        return self.last

    @torch.no_grad()
    def eval_step(self, **batch_data: object) -> dict[str, torch.Tensor]:
        """Return the losses of a batch by name, averaged over the data-parallel ranks.

        Raises:
            DataError: The batch does not split into micro batches.
        """
        losses = self._run_schedule(self.get_batch_data_iterator(batch_data), batch_data, forward_only=True)
        for name, loss in losses.items():
            self._eval_losses[name] = self._eval_losses.get(name, torch.zeros_like(loss)) + loss
            count = f"{name}_num_iters"
            self._eval_losses[count] = self._eval_losses.get(count, torch.zeros_like(loss)) + 1
        return losses

    def forward(self, **batch_data: object) -> Any:
        """Take a training step in training mode; otherwise evaluate."""
        losses = self.train_step(**batch_data).losses if self.training else self.eval_step(**batch_data)
        self.loss = torch.stack(list(losses.values())).sum()
        return _output(self._run, self.loss, self._logits)

    @property
    def plugin(self) -> MegatronLMPlugin:
        """The user's configuration."""
        return self._run.plugin

    def progress(self) -> dict[str, Any]:
        """Return the progress of the run under Megatron-LM's names; it is the same on all ranks."""
        return {
            "iteration": self.iteration,
            "consumed_train_samples": self.consumed_samples,
            "sizes": dict(self._run.layout.sizes),
            "datasets": [iterator.state_dict() for iterator in self.datasets],
        }

    def go_on_from(self, progress: Mapping[str, Any]) -> None:
        """Continue counting from a saved progress."""
        self.iteration = progress["iteration"]
        self.consumed_samples = progress["consumed_train_samples"]
        for iterator, state in zip(self.datasets, progress["datasets"], strict=False):
            iterator.load_state_dict(state)

    def log_eval_results(self) -> None:
        """Log the mean losses of all evaluation steps since the last call, on the last rank, and reset them."""
        for name, total in self._eval_losses.items():
            count = self._eval_losses.get(f"{name}_num_iters")
            if count is not None and self._run.world.is_last:
                _logger.info("validation loss at iteration %d | %s: %.6f", self.iteration, name, float(total / count))
        self._eval_losses = {}

    def save_checkpoint(self, output_dir: object) -> None:
        """Refuse: an engine is saved together with its run."""
        raise PreparationError(
            f"An engine is saved and loaded together with its run; got save_checkpoint({str(output_dir)!r}). Call "
            "accelerator.save_state."
        )

    def load_checkpoint(self, input_dir: object) -> None:
        """Refuse: an engine is loaded together with its run."""
        raise PreparationError(
            f"An engine is saved and loaded together with its run; got load_checkpoint({str(input_dir)!r}). Call "
            "accelerator.load_state."
        )

    def _run_schedule(
        self, iterator: object, batch: Mapping[str, Any], *, forward_only: bool
    ) -> dict[str, torch.Tensor]:
        """Run all micro batches through megatron-core's schedule, and return the losses, the same on every rank."""
        parts = self._run.plugin.num_micro_batches or 1
        samples = batches.check(self._run, batch)
        # Transformers and megatron-core's datasets name the tokens differently.
        lengths = [batch[name].shape[1] for name in ("input_ids", "tokens", "text", "text_enc") if name in batch]
        found = library.core("pipeline_parallel").get_forward_backward_func()(
            forward_step_func=self.train_step_handler.forward_step,  # type: ignore[attr-defined]
            data_iterator=iterator,
            model=list(self.module),
            num_microbatches=parts,
            seq_length=lengths[0] if lengths else self._run.arguments.seq_length,
            micro_batch_size=samples // parts,
            forward_only=forward_only,
        )
        return self._reduce(found)

    def _reduce(self, reported: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the means of what the micro batches reported, over the data-parallel ranks, on every stage."""
        state = library.core("parallel_state")
        last = state.is_pipeline_last_stage(ignore_virtual=True)  # the only stage that computes losses
        logits = [part.pop("logits") for part in reported if "logits" in part]
        if last:
            reduced = {
                name: self._mean([part[name] for part in reported]) for name in (reported[0] if reported else ())
            }
        if state.get_pipeline_model_parallel_world_size() == 1:
            self._logits = torch.cat(logits) if logits else None
            return reduced
        return self._to_all_stages(reduced if last else {}, torch.cat(logits) if logits else None)

    def _mean(self, values: list[torch.Tensor]) -> torch.Tensor:
        state = library.core("parallel_state")
        # Ranks that share a sequence hold different tokens.
        group = state.get_data_parallel_group(with_context_parallel=True)
        stacked = torch.stack([torch.as_tensor(value, device=self._run.device).float() for value in values])
        if stacked.dim() == 1:  # the user's own loss, already averaged
            return stacked.mean()
        if self.config.calculate_per_token_loss:
            total = stacked.sum(0)
            dist.all_reduce(total, group=group)
            return total[0] / total[1].clamp(min=1)  # a batch may have no token that counts
        mean = (stacked[:, 0] / stacked[:, 1].clamp(min=1)).mean()
        dist.all_reduce(mean, group=group)
        return mean / dist.get_world_size(group)

    def _to_all_stages(self, reduced: dict[str, torch.Tensor], logits: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Send the results of the last stage to all stages: losses, and logits if they were requested."""
        state = library.core("parallel_state")
        group, source = state.get_pipeline_model_parallel_group(), state.get_pipeline_model_parallel_last_rank()
        shape = None
        if self._names is None or self._run.plugin.return_logits:  # names never change; the shape of logits may
            shared: list[Any] = [list(reduced), None if logits is None else (tuple(logits.shape), logits.dtype)]
            dist.broadcast_object_list(shared, src=source, group=group)
            self._names, shape = shared
        packed = (  # one message for all losses
            torch.stack([reduced[name] for name in self._names])
            if reduced
            else torch.empty(len(self._names), device=self._run.device)
        )
        dist.broadcast(packed, src=source, group=group)
        self._logits = None  # those of the last call must not be returned again
        if shape is not None:
            whole = torch.empty(shape[0], dtype=shape[1], device=self._run.device) if logits is None else logits
            dist.broadcast(whole.contiguous(), src=source, group=group)
            self._logits = whole
        return dict(zip(self._names, packed.unbind(), strict=True))


def _step(accelerator: object, run: MegatronRun) -> AbstractTrainStep:
    """Return the training step of a run: the user's own, or the one for its kind of model."""
    own = run.plugin.custom_train_step_class
    if own is None:
        return _STEPS[run.arguments.model_type_name](accelerator, run.arguments)
    made: AbstractTrainStep = own(accelerator, run.arguments, **(run.plugin.custom_train_step_kwargs or {}))
    return made


def _output(run: MegatronRun, loss: torch.Tensor, logits: torch.Tensor | None) -> object:
    """Return the output class of the corresponding transformers model, or a tuple if so configured."""
    if not run.arguments.model_return_dict:
        return (loss,) if logits is None else (loss, logits)
    outputs = importlib.import_module("transformers.modeling_outputs")
    name = _OUTPUTS.get(run.arguments.model_type_name, "ModelOutput")
    if name == "ModelOutput":
        return importlib.import_module("transformers.utils").ModelOutput(loss=loss, logits=logits)
    return getattr(outputs, name)(loss=loss, logits=logits)
