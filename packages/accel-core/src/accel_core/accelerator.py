"""`Accelerator`: the one object that a training loop talks to. It delegates, and decides nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch.utils.hooks import RemovableHandle

from accel_core import checkpoint
from accel_core._passed import Passed, PassedOn
from accel_core._records import takes
from accel_core.checkpoint import plain
from accel_core.checkpoint.report import RestoreReport
from accel_core.comm import collectives
from accel_core.comm.padding import pad_across_processes
from accel_core.data.metrics import gather_for_metrics
from accel_core.data.skip import skip_first_batches
from accel_core.devices.memory import release_memory
from accel_core.errors import PreparationError, StateError, expect
from accel_core.mesh.layout import MESH_AXES
from accel_core.modules import empty, linear_loss
from accel_core.optim.accumulation import Batch
from accel_core.optim.average import ModelAverage
from accel_core.optim.optimizer import AcceleratedOptimizer, is_lomo, lomo_backward
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.options.enums import DistributedType, FP8BackendType
from accel_core.plugins.handlers import AutocastKwargs, DistributedDataParallelKwargs, ProfileKwargs, profile
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.plugins.project import ProjectConfiguration
from accel_core.process import world
from accel_core.resolve import Arguments, arguments_now, resolve
from accel_core.state.gradient import GradientState
from accel_core.state.process_control import FunctionControl
from accel_core.strategies import placement
from accel_core.strategies.parts import Clip, Kit, SequenceBuffers
from accel_core.strategies.strategy import sync_next_backward
from accel_core.tqdm import byte_bar

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader
    from typing_extensions import TypeVarTuple, Unpack

    from accel_core.metering import Meter

    _Ts = TypeVarTuple("_Ts")

_LoaderT = TypeVar("_LoaderT", bound="DataLoader[Any]")
_A = TypeVar("_A", bound="Accelerator")
_T = TypeVar("_T")
_T1 = TypeVar("_T1")
_T2 = TypeVar("_T2")


class Accelerator(FunctionControl):
    """Runs a plain PyTorch loop on one process or many, in the precision and with the strategy asked for.

    Args:
        device_placement: Whether `prepare` moves objects to the process's device.
        split_batches: Whether a loader's batches are split between processes instead of each process reading its own
            batch of that size. Prefer `DataLoaderConfiguration(split_batches=…)`.
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`; `None` reads ACCELERATE_MIXED_PRECISION.
        gradient_accumulation_steps: Number of batches that make one optimizer step.
        cpu: Compute on the CPU whatever hardware is here.
        dataloader_config: How loaders are prepared.
        deepspeed_plugin: Asks for DeepSpeed.
        fsdp_plugin: Asks for fully sharded data parallel.
        torch_tp_plugin: Asks for tensor parallel.
        megatron_lm_plugin: Asks for Megatron-LM.
        rng_types: Generators that are made equal on all processes at the start of each epoch (`torch`, `cuda`,
            `generator` …).
        log_with: Trackers, by name, `LoggerType`, instance, a list of these, or `"all"`.
        project_dir: Folder for checkpoints and logs.
        project_config: Where and how they are kept, in detail.
        gradient_accumulation_plugin: Accumulation in detail, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: Whether schedules move only when their optimizers moved. They then move once for
            each process (see `AcceleratedScheduler`).
        kwargs_handlers: Arguments for what works underneath: `DistributedDataParallelKwargs`, `AutocastKwargs` …
        dynamo_backend: Compile models with this backend.
        dynamo_plugin: Compilation in detail, instead of `dynamo_backend`.
        deepspeed_plugins: As `deepspeed_plugin`, several by name.
        parallelism_config: The axes of an N-D mesh.

    Attributes:
        state (AcceleratorState): The process and how it trains.
        gradient_state (GradientState): Where the step stands.

    Raises:
        ConfigurationError: Arguments that contradict each other or the environment.
        DeviceUnavailableError: Hardware that is not here, or does not compute in the precision asked for.
        EngineUnavailableError: An engine that this version does not contain; it is never replaced by another one.

    Examples:
        >>> accelerator = Accelerator(cpu=True)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for images, labels in loader:
        ...     accelerator.backward(cross_entropy(model(images), labels))
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    @takes(Arguments)
    def __init__(self, given: Arguments) -> None:
        self._set_up(given)
        self.has_lomo_optimizer = False
        handlers = self._runtime.handlers
        self.scaler_handler = handlers.get("GradScalerKwargs")
        self.init_handler = handlers.get("InitProcessGroupKwargs")
        self.profile_handler: Any = handlers.get("ProfileKwargs")
        self.fp8_recipe_handler = handlers.get("FP8RecipeKwargs")
        self.te_recipe_handler = handlers.get("TERecipeKwargs")
        self.msamp_recipe_handler = handlers.get("MSAMPRecipeKwargs")
        self.ao_recipe_handler = handlers.get("AORecipeKwargs")
        self.has_fp8_handler = any("RecipeKwargs" in name for name in handlers)

    def _set_up(self, arguments: Arguments) -> None:
        self._runtime, self.state = resolve(arguments)
        self._arguments = arguments
        if "://" in (self._runtime.project.project_dir or ""):
            checkpoint.save.check_project(self._runtime)
        self.gradient_state: GradientState = self._runtime.gradient_state

    def __deepcopy__(self: _A, memo: object) -> _A:
        """Return the same Accelerator: it stands for this process, of which there is one."""
        return self

    def __copy__(self: _A) -> _A:
        # Not by `__getstate__`, which `copy.copy` would use: that sets up a second runtime.
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process makes an Accelerator of: how this one runs, and what was prepared."""
        made_here = ("_runtime", "_arguments", "flag_tensor", "state", "gradient_state")
        return {
            "arguments": arguments_now(self._arguments, self._runtime),
            "prepared": self._runtime.prepared(),
            "attributes": {name: value for name, value in self.__dict__.items() if name not in made_here},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Run as the pickled Accelerator did, among the processes that are here.

        Raises:
            ConfigurationError: This process trains in another precision or with another engine already.
        """
        self._set_up(state["arguments"])
        self._runtime.adopt(state["prepared"])
        self.__dict__.update(state["attributes"])

    def _find_world(self) -> world.World:
        return self._runtime.world

    device = Passed[torch.device]("_runtime.world.device", "The device of this process.")

    distributed_type = Passed[DistributedType]("state.distributed_type", "How the run is spread, as a label.")

    num_processes = Passed[int]("_runtime.world.size", "Number of processes.")

    process_index = Passed[int]("_runtime.world.rank", "Number of this process, from 0.")

    local_process_index = Passed[int]("_runtime.world.local_rank", "Number of this process on its machine.")

    @property
    def multi_device(self) -> bool:
        """Whether several processes train copies of the model on devices of their own."""
        return self.use_distributed and self.distributed_type.value.startswith("MULTI_")

    mixed_precision = Passed[str]("state.mixed_precision", "The number format of the forward pass.")

    native_amp = PassedOn[bool](
        "_runtime.precision.native_amp",
        "Whether torch's autocast does mixed precision, in models prepared from here on and in `autocast` blocks.",
    )

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """Arguments of autocast, for models prepared from here on and for `autocast` blocks."""
        return self._runtime.handlers.get("AutocastKwargs")

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._runtime.set_handler(AutocastKwargs, handler)
        self._runtime.precision.autocast_arguments = handler or AutocastKwargs()

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """Arguments of `DistributedDataParallel`, for models prepared from here on."""
        return self._runtime.handlers.get("DistributedDataParallelKwargs")

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        self._runtime.set_plugin(DistributedDataParallelKwargs, handler)

    device_placement = PassedOn[bool](
        "_runtime.device_placement", "Whether objects prepared from here on are moved to the device."
    )

    dataloader_config = PassedOn[DataLoaderConfiguration]("_runtime.data", "How loaders are prepared from here on.")

    step_scheduler_with_optimizer = PassedOn[bool](
        "_runtime.step_scheduler_with_optimizer",
        "Whether schedules prepared from here on move only when their optimizers moved.",
    )

    project_configuration = PassedOn[ProjectConfiguration]("_runtime.project", "Where checkpoints and logs go.")
    scaler = PassedOn[torch.amp.GradScaler | None](
        "_runtime.scaler", "The gradient scaler of fp16 training, or `None`."
    )

    fp8_backend = Passed[FP8BackendType]("_runtime.precision.fp8_backend", "The library behind fp8; `NO` without fp8.")

    @property
    def fp8_enabled(self) -> bool:
        """Whether the run computes in fp8."""
        return self.mixed_precision == "fp8"

    rng_types = PassedOn[list[Any]](
        "_runtime.rng_types", "Generators that are made equal on all processes at the start of each epoch."
    )

    split_batches = Passed[bool](
        "dataloader_config.split_batches", "Whether a loader's batches are split between processes."
    )

    dispatch_batches = Passed[bool | None](
        "dataloader_config.dispatch_batches",
        "Whether the main process reads for all; `None` decides by the kind of dataset.",
    )

    even_batches = PassedOn[bool](
        "dataloader_config.even_batches",
        "Whether first samples are repeated so that every process gets equally many batches.",
    )

    use_seedable_sampler = Passed[bool](
        "dataloader_config.use_seedable_sampler", "Whether shuffling depends on a seed and the epoch alone."
    )

    non_blocking = Passed[bool](
        "dataloader_config.non_blocking", "Whether batches travel to the device while the process continues."
    )

    use_stateful_dataloader = Passed[bool](
        "dataloader_config.use_stateful_dataloader", "Whether loaders are torchdata's StatefulDataLoader."
    )

    project_dir = Passed[str | None]("project_configuration.project_dir", "Folder for checkpoints and logs.")

    logging_dir = Passed[str | None]("project_configuration.logging_dir", "Folder for logs.")

    save_iteration = Passed[int](
        "project_configuration.iteration", "Number of the next automatically named checkpoint."
    )

    deepspeed_plugin = Passed[Any]("state.deepspeed_plugin", "The DeepSpeed plugin in use, or `None`.")

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The configuration of the DeepSpeed plugin in use, filled by the last `prepare`; `None` without DeepSpeed."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The last engine of DeepSpeed that was prepared, in its wrapper; `None` without one."""
        return getattr(self._runtime.strategy, "engine_wrapped", None)

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The axes of the mesh, or `None`."""
        return self._runtime.strategy.parts.parallelism or self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh, or `None`."""
        own = self._runtime.mesh
        return self.state.device_mesh if own is None else own

    is_fsdp2 = Passed[bool]("state.is_fsdp2", "Whether models are sharded in place (FSDP version 2).")

    is_composable_parallelism_enabled = Passed[bool]("is_fsdp2", "Whether strategies are composed on one mesh.")

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes the model when it is saved."""
        return self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process

    @property
    def _ranks(self) -> SimpleNamespace:
        """This process's place on each axis of the mesh; 0 on one that the mesh does not have."""
        if self.parallelism_config is None:
            raise StateError(
                "A process has a place on an axis of the mesh; got no parallelism_config. "
                "Pass Accelerator(parallelism_config=ParallelismConfig(...)) first."
            )
        return SimpleNamespace(**{axis: self._runtime.layout.place((axis,)) for axis in MESH_AXES})

    tensor_parallel_rank = Passed[int]("_ranks.tp", "Number of this process on the tensor-parallel axis, from 0.")
    data_parallel_rank = Passed[int]("_ranks.dp_replicate", "Number of this process on the axis of copies, from 0.")
    data_parallel_shard_rank = Passed[int]("_ranks.dp_shard", "Number of this process on the axis of shards, from 0.")
    pipeline_parallel_rank = Passed[int]("_ranks.pp", "Number of this process on the pipeline axis, from 0.")
    context_parallel_rank = Passed[int]("_ranks.cp", "Number of this process on the context-parallel axis, from 0.")

    _models = PassedOn[list[Any]]("_runtime.models", "What libraries look at by this private name.")
    _optimizers = PassedOn[list[Any]]("_runtime.optimizers", "What libraries look at by this private name.")
    _schedulers = PassedOn[list[Any]]("_runtime.schedulers", "What libraries look at by this private name.")
    _dataloaders = PassedOn[list[Any]]("_runtime.dataloaders", "What libraries look at by this private name.")
    _custom_objects = PassedOn[list[Any]]("_runtime.custom_objects", "What libraries look at by this private name.")

    @overload
    def prepare(self, obj: _T, /, *, device_placement: list[bool] | None = None) -> _T: ...
    @overload
    def prepare(
        self, first: _T1, second: _T2, /, *others: Unpack[_Ts], device_placement: list[bool] | None = None
    ) -> tuple[_T1, _T2, Unpack[_Ts]]: ...
    @overload
    def prepare(self, *args: object, device_placement: list[bool] | None = None) -> Any: ...
    def prepare(self, *args: object, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedules for this run.

        Args:
            *args: The objects, in any order, each as an argument of its own; what is none of these, a list of them
                too, comes back untouched.
            device_placement: For each object, whether it is moved to the device.

        Returns:
            The prepared objects in the same order; one object alone, not in a tuple. A module that takes a place in a
            prepared model is not averaged over the ranks: call `free_memory`, and prepare the model again.

        Raises:
            PreparationError: Objects that cannot train together; nothing was prepared then.

        Examples:
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> test_loader = accelerator.prepare(test_loader)
        """
        kit = Kit(self._runtime.optimizers, self._runtime.keep_model, self._prepare_one)
        prepared = self._runtime.prepare(args, device_placement, kit)
        return prepared if len(prepared) > 1 else prepared[0] if prepared else prepared

    def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        """Prepare one object of a `prepare`; here subclasses take hold of any of them."""
        kind = self._runtime.kind_of(obj)
        if not first_pass:
            return self.prepare_scheduler(obj) if kind == "schedulers" else obj
        if kind == "models":
            return self.prepare_model(obj, device_placement=device_placement)
        if kind == "optimizers":
            return self.prepare_optimizer(obj, device_placement=device_placement)
        return self.prepare_data_loader(obj, device_placement=device_placement) if kind == "loaders" else obj

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model.

        Args:
            model: The model.
            device_placement: Whether it is moved to the device; `None` leaves that to the run.
            evaluation_mode: It is not trained, so it is not distributed. Preparing it again later for training is
                legal, and distributes it.

        Returns:
            The model, moved to the device, and wrapped where the strategy asks for it.

        Examples:
            >>> teacher = accelerator.prepare_model(Net(), evaluation_mode=True)
        """
        return self._runtime.prepare_model(model, device_placement, evaluation=evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap one optimizer; the same optimizer again gives the same wrapper.

        Args:
            optimizer: Any optimizer of torch.
            device_placement: Whether its state is moved to the device; by default as for all objects.

        Returns:
            The wrapper, which steps only when a window is full.

        Examples:
            >>> model = accelerator.prepare_model(model)
            >>> optimizer = accelerator.prepare_optimizer(optimizer)
        """
        prepared = self._runtime.prepare_optimizer(optimizer, device_placement)
        self.has_lomo_optimizer |= is_lomo(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap one schedule.

        Args:
            scheduler: Any schedule of torch, of a prepared optimizer.

        Returns:
            The wrapper, which steps when its optimizer did.

        Examples:
            >>> optimizer = accelerator.prepare_optimizer(optimizer)
            >>> schedule = accelerator.prepare_scheduler(schedule)
        """
        return self._runtime.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Give each process its part of one loader.

        Args:
            data_loader: The loader.
            device_placement: Whether batches are moved to the device; `None` leaves that to the run.
            slice_fn_for_dispatch: Cuts a batch for one process where the main process reads for all.

        Returns:
            A loader of the same class, which yields this process's batches on its device.

        Examples:
            >>> loader = accelerator.prepare_data_loader(loader, device_placement=False)
        """
        return self._runtime.prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the model inside what `prepare` returned.

        Args:
            model: A prepared model, or a plain one.
            keep_fp32_wrapper: Keep the mixed-precision forward.
            keep_torch_compile: Keep the compiled form.

        Returns:
            The bare model.

        Examples:
            >>> prepared = accelerator.prepare(model)
            >>> type(accelerator.unwrap_model(prepared)) is Net
            True
        """
        fits = not isinstance(model, str | int | float | dict)
        expect(fits, model, "The model is a torch.nn.Module", "Pass the model itself.")
        return self._runtime.strategy.unwrap(
            model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile
        )

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map places the parts of `model`, or of a part of it, one by one.

        Args:
            model: Any model.

        Returns:
            Whether one does, with more than one entry.

        Examples:
            >>> accelerator.verify_device_map(model)
            False
        """
        return placement.is_spread(model)

    def free_memory(self, *objects: object) -> list[Any]:
        """Let go of everything that was prepared, restart `step`, and collect garbage.

        Args:
            *objects: The caller's own references, to be replaced by the `None`s that come back.

        Returns:
            As many `None` as objects.

        Examples:
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> model, optimizer = accelerator.free_memory(model, optimizer)
            >>> model is None
            True
        """
        self._runtime.release()
        return release_memory(*objects)

    def clear(self, *objects: object) -> list[Any]:
        """Do the same as `free_memory`.

        Args:
            *objects: The caller's own references, as for `free_memory`.

        Returns:
            As many `None` as objects.

        Examples:
            >>> model = accelerator.prepare(model)
            >>> (model,) = accelerator.clear(model)
        """
        return self.free_memory(*objects)

    step = PassedOn[int]("_runtime.accumulation.step", "Number of batches since the last end of the data.")

    sync_gradients = PassedOn[bool](
        "gradient_state.sync_gradients", "Whether the current step synchronizes gradients and moves the optimizer."
    )

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of batches that make one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """Count one batch; inside the block gradients are synchronized only where the window ends.

        Args:
            *models: The models that the block trains.

        Returns:
            The block, for `with`.

        Examples:
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> for images, labels in loader:
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(cross_entropy(model(images), labels))
            ...         optimizer.step()  # every second batch, and at the end of the data
            ...         optimizer.zero_grad()
        """
        runtime = self._runtime
        return Batch(runtime.accumulation, models, runtime.strategy.no_sync)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Leave gradients of `model` unsynchronized in backward passes of the block.

        Args:
            model: A prepared model.

        Returns:
            The block, for `with`.

        Examples:
            >>> from contextlib import nullcontext
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> for number, (images, labels) in enumerate(loader):
            ...     with nullcontext() if number % 2 else accelerator.no_sync(model):
            ...         accelerator.backward(cross_entropy(model(images), labels))
        """
        return self._runtime.strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
        """Synchronize gradients in the backward pass of the block although forward ran under `no_sync`.

        Args:
            model: A prepared model, whose forward ran under `no_sync`.

        Returns:
            The block, for `with`.

        Examples:
            >>> model = accelerator.prepare(model)
            >>> with accelerator.no_sync(model):
            ...     first, second = model(torch.rand(2, 64)).sum(), model(torch.rand(2, 64)).sum()
            ...     accelerator.backward(first)  # not synchronized
            ...     with accelerator.trigger_sync_in_backward(model):
            ...         accelerator.backward(second)  # synchronizes the gradients of both
        """
        return sync_next_backward(model)

    def backward(self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **kwargs: object) -> None:
        """Compute gradients of `loss`, divided for the accumulation window and scaled for the precision.

        With `weight`, `loss` is a *sum* over that many units (tokens, say), which may differ between batches and
        processes and may be zero. When the window closes, gradients are those of the sum of all losses over the sum
        of all weights of all processes: exactly what one big batch would give.

        Args:
            loss: A scalar: the batch's mean loss, or with `weight` its summed loss.
            weight: Number of units in a summed loss; give it for all batches of a window or none.
            **kwargs: Passed to `Tensor.backward`; `learning_rate` is taken by LOMO optimizers.

        Raises:
            ConfigurationError: Some batches of a window have a weight and others do not.

        Examples:
            The gradient of the mean over all tokens, where batches have different numbers of them:

            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> for images, labels in loader:
            ...     losses = cross_entropy(model(images), labels, reduction="sum")
            ...     accelerator.backward(losses, weight=len(labels))
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        self._runtime.backward(loss, weight, kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the fused backward and update of a LOMO optimizer.

        Args:
            loss: A scalar.
            learning_rate: The rate of this update.

        Raises:
            PreparationError: No LOMO optimizer was prepared, or no rate was given.

        Examples:
            >>> from lomo_optim import Lomo
            >>> model, optimizer = accelerator.prepare(model, Lomo(model, lr=0.1))
            >>> accelerator.lomo_backward(model(torch.rand(2, 64)).sum(), learning_rate=0.1)
        """
        if learning_rate is None:
            raise PreparationError(
                "A LOMO optimizer updates weights inside backward; pass learning_rate to backward()."
            )
        lomo_backward(self._optimizers, loss, learning_rate)

    def linear_cross_entropy(
        self,
        hidden: torch.Tensor,
        head: torch.nn.Module,
        labels: torch.Tensor,
        *,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        softcap: float | None = None,
        chunk: int | None = None,
    ) -> torch.Tensor:
        """Return the cross entropy of a head's logits, which never exist as a whole.

        Logits of some tokens are computed at a time, with their gradients. Where tensor parallel shares out the rows of
        the head, each rank computes with its own, and ranks add up what a token needs: a maximum and two sums. Of a
        sharded model, call it in the forward, which has the weight; a head that is sharded on its own is gathered slice
        by slice, in forward and in backward, and never whole.

        Any other head is called on some tokens at a time, and once more in backward: one with an adapter, with hooks,
        with a forward of its own, or of several layers. Its logits of a token have to follow from what enters for that
        token, and to be the same in both calls.

        Args:
            hidden: What enters the head, shape (..., features).
            head: The linear layer, with or without bias, whose weight may be tied to an embedding; or any other module
                that makes logits, of shape (..., words).
            labels: The number of the right row for each token, shape (...).
            ignore_index: The label of tokens that do not count. Where none counts, the loss is 0.
            reduction: `"mean"` of the tokens that count, or `"sum"`.
            softcap: Logits become `softcap * tanh(logits / softcap)` before.
            chunk: Number of tokens whose logits exist at a time; `None` lets them take the memory of `hidden`.

        Returns:
            The loss of this rank's tokens.

        Raises:
            DataError: A label is outside the vocabulary. On another device than the CPU the loss is NaN instead.
            StateError: The numbers of tokens and labels differ, or the weight is spread in another way.

        Examples:
            >>> head = torch.nn.Linear(64, 1000, bias=False)
            >>> loss = accelerator.linear_cross_entropy(torch.rand(2, 8, 64), head, torch.zeros(2, 8, dtype=torch.long))
            >>> loss.shape
            torch.Size([])
        """
        given = {"ignore_index": ignore_index, "reduction": reduction, "softcap": softcap, "chunk": chunk}
        return linear_loss.linear_cross_entropy(hidden, head, labels, **given)  # type: ignore[arg-type]

    def chunk_logits(self, model: torch.nn.Module, chunk: int | None = None) -> None:
        """Let a language model of transformers compute its loss by `linear_cross_entropy` once it is prepared.

        In a call with `labels`, its output has the loss and no logits; other calls are as before. Called before
        `prepare`, it has the head sharded on its own, where nothing else has its weight. A model of PEFT is its base
        model with the adapters that it has, also on the head.

        Args:
            model: The model, prepared or not.
            chunk: As in `linear_cross_entropy`.

        Raises:
            PreparationError: It is not a causal language model of transformers, or its forward has a loss of its own.

        Examples:
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> settings = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
            >>> model = accelerator.prepare(GPT2LMHeadModel(settings))
            >>> accelerator.chunk_logits(model)
            >>> ids = torch.zeros(1, 8, dtype=torch.long)
            >>> model(input_ids=ids, labels=ids).logits is None
            True
        """
        is_prepared = self._runtime.place_of(model) is not None
        bare = self.unwrap_model(model, keep_torch_compile=False)
        (linear_loss.apply_to_head if is_prepared else linear_loss.ask)(bare, chunk)

    def unscale_gradients(self, optimizer: object = None) -> None:
        """Divide gradients by the scale of fp16 training, once a window; elsewhere do nothing.

        Args:
            optimizer: A prepared optimizer or a list of them; all where `None`.

        Examples:
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> accelerator.backward(model(torch.rand(2, 64)).sum())
            >>> accelerator.unscale_gradients()
            >>> largest = max(weight.grad.abs().max() for weight in model.parameters())  # the same with fp16
        """
        self._runtime.unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients down to a common norm of at most `max_norm`.

        Args:
            parameters: The parameters.
            max_norm: Largest norm.
            norm_type: Which p-norm.

        Returns:
            The norm before, a scalar tensor.

        Examples:
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> for images, labels in loader:
            ...     accelerator.backward(cross_entropy(model(images), labels))
            ...     if accelerator.sync_gradients:
            ...         norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        runtime = self._runtime
        strategy = runtime.strategy
        scale = 1.0
        if strategy.number_format.scaler is not None:
            self.unscale_gradients()
            scale = runtime.scale_left
        # Made without the constructor that a named tuple has in Python, which is 2 µs of every step.
        clip = tuple.__new__(Clip, (_listed(parameters), max_norm * scale, norm_type, runtime.models))
        norm = strategy.clip_grad_norm_(clip)
        return norm if scale == 1.0 else norm / scale

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each gradient element to [-clip_value, clip_value].

        Args:
            parameters: A tensor, or tensors, whose gradients are clipped.
            clip_value: Largest absolute value that a gradient element keeps.

        Examples:
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> accelerator.backward(model(torch.rand(2, 64)).sum())
            >>> if accelerator.sync_gradients:
            ...     accelerator.clip_grad_value_(model.parameters(), 0.5)
        """
        runtime = self._runtime
        self.unscale_gradients()
        limit = clip_value * runtime.scale_left
        runtime.strategy.clip_grad_value_(Clip(_listed(parameters), limit, models=runtime.models))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's last step was skipped because of infinite or NaN gradients."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def empty_init(self, seed: int = 0) -> AbstractContextManager[None]:
        """Let a model be made without memory; `prepare` gives each rank its part, with values, and no rank the whole.

        Values come from each module's own `reset_parameters`, and from transformers' `_init_weights`, with random
        numbers that depend on the seed and on names alone: they are those of one process, whatever the ranks and the
        way to share the model. A module has memory for as long as its values are made.

        Args:
            seed: Another one gives other values; all ranks pass the same.

        Returns:
            A context manager, in which the model is made. It does not touch the random numbers of the process.

        Raises:
            PreparationError: A module reads a value, or writes one outside of `reset_parameters`;
                and in `prepare`, a module has no method that gives it its values.

        Examples:
            >>> with accelerator.empty_init():
            ...     model = torch.nn.Linear(64, 2)
            >>> model.weight.is_meta
            True
            >>> accelerator.prepare(model).weight.is_meta
            False
        """
        return empty.empty_init(seed)

    def ema(
        self,
        model: torch.nn.Module,
        decay: float = 0.999,
        every: int = 1,
        device: torch.device | str | None = None,
        *,
        buffers: Literal["copy", "average"] = "copy",
    ) -> ModelAverage:
        """Average the weights of a prepared model as it trains; every rank calls it.

        Each rank averages what it holds, where a step of a prepared optimizer was really made: at the end of an
        accumulation window, and not where the gradient scaler skipped the step. `save_state` and `load_state` include
        the average. Averages of 16-bit weights have 32 bits.

        Args:
            model: The prepared model, with the parameters that will train.
            decay: The share of the average that an update keeps, from 0 to 1.
            every: Number of optimizer steps between two updates.
            device: Where the average is kept, such as `"cpu"`; `None` keeps it where the weights are.
            buffers: `"copy"` evaluates with the model's own buffers, `"average"` averages floating-point ones as well.

        Returns:
            The average, whose `applied()` puts it in the place of the weights for the length of a block.

        Raises:
            ConfigurationError: A decay, number of steps, device or kind of buffers that cannot be.
            EngineUnavailableError: The weights that train are inside of the engine, which has no average of them.
            PreparationError: The model was not prepared, or none of its parameters trains.
            RankDisagreementError: Ranks pass different arguments.

        Examples:
            >>> model, optimizer = accelerator.prepare(model, optimizer)
            >>> ema = accelerator.ema(model, decay=0.99)
            >>> accelerator.backward(model(torch.rand(2, 64)).sum())
            >>> optimizer.step()
            >>> with ema.applied():
            ...     scores = model(torch.rand(2, 64))
            >>> accelerator.save_model(ema, "averaged")
        """
        return self._runtime.average(model, decay, every, device, buffers)

    @property
    def meter(self) -> Meter | None:
        """What measures the steps, with `MeterKwargs` among the handlers; its `last` has the numbers. Else `None`."""
        meter: Meter | None = self._runtime.meter
        return meter

    replicas = Passed[Any](
        "_runtime.replicas",
        "The copies of this run that train with it, as `accel launch --replicas` starts them; else `None`.",
    )

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Compute the block in the run's mixed precision.

        Args:
            autocast_handler: Replaces the run's own autocast arguments in this block.

        Returns:
            The block, for `with`.

        Examples:
            The forward pass of a prepared model needs no autocast of its own; a computation beside it does:

            >>> with accelerator.autocast():
            ...     scores = torch.rand(2, 64) @ torch.rand(64, 10)
        """
        return self._runtime.precision.autocast(autocast_handler)

    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let processes with fewer batches go along until the last one is done (`torch.distributed.algorithms.join`).

        Args:
            joinables: Prepared models and optimizers that take part.
            even_batches: Overrides, inside the block, whether first samples are repeated to make batches even.

        Returns:
            The block, for `with`.

        Examples:
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     for images, labels in loader:
            ...         accelerator.backward(cross_entropy(model(images), labels))
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        return self._runtime.join_uneven(joinables, even_batches)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Split buffers along their sequence dims where context parallel is on; elsewhere do nothing.

        Args:
            buffers: Tensors to split.
            buffer_seq_dims: For each, its sequence dim.
            no_restore_buffers: Those that need not be put back together.

        Returns:
            The block, for `with`.

        Examples:
            >>> tokens = torch.arange(16).reshape(2, 8)
            >>> with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            ...     length = tokens.shape[1]  # with cp_size=2: 4
        """
        given = SequenceBuffers(buffers or (), buffer_seq_dims or (), no_restore_buffers or ())
        return self._runtime.strategy.split_context(given)

    def deepspeed_ulysses_dl_adapter(self, dl: _T, model: torch.nn.Module) -> _T:
        """Adapt a loader to Ulysses sequence parallel; a run without it gets its loader back.

        Args:
            dl: A prepared loader.
            model: The prepared model that it feeds.

        Returns:
            The loader whose batches are split along the sequence.

        Examples:
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> loader = accelerator.deepspeed_ulysses_dl_adapter(loader, model)
        """
        return self._runtime.strategy.adapt_loader(dl, model)

    def gather(self, tensor: _T) -> _T:
        """Concatenate every process's tensors along their first dim, on every process.

        Args:
            tensor: A tensor, or any nest of tensors, of equal shape on all processes.

        Returns:
            The same nest with the joined tensors; a scalar of each process becomes one row.

        Examples:
            >>> everyones = accelerator.gather(torch.tensor([accelerator.process_index]))
            >>> len(everyones) == accelerator.num_processes
            True
        """
        with self._runtime.timed("exchange"):
            return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gather, and drop what was only repeated to make the last batch even.

        Args:
            input_data: Tensors or objects of the current batch, one entry a sample.
            use_gather_object: Pickle everything, even tensors.

        Returns:
            The nest over all processes, each sample once, in the order of the sampler.

        Raises:
            DataError: Ranks hold parts of samples.

        Examples:
            >>> model, test_loader = accelerator.prepare(model, test_loader)
            >>> for images, labels in test_loader:
            ...     guesses = model(images).argmax(1)
            ...     guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            ...     asked += len(labels)
            >>> asked == len(data)
            True
        """
        input_data = self._runtime.strategy.whole_metrics(input_data)
        with self._runtime.timed("exchange"):
            return gather_for_metrics(input_data, self.gradient_state, use_gather_object, gather=self.gather)

    def reduce(self, tensor: _T, reduction: str = "sum", scale: float = 1.0) -> _T:
        """Combine tensors over all processes: their `sum` (or `none`, the same), `mean` or `max`.

        Args:
            tensor: A tensor, or any nest of tensors, of equal shape on all processes.
            reduction: One of the four.
            scale: Factor for the result on XLA devices; it has no effect elsewhere.

        Returns:
            The same nest with the combined tensors, on every process.

        Examples:
            >>> mean = accelerator.reduce(torch.tensor(0.5), "mean")
        """
        with self._runtime.timed("exchange"):
            return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: _T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> _T:
        """Pad tensors along `dim` with `pad_index` to the largest size of any process.

        Args:
            tensor: A tensor, or any nest of tensors.
            dim: Dim along which sizes may differ.
            pad_index: Value to pad with.
            pad_first: Pad at the beginning instead of the end.

        Returns:
            The same nest, with tensors of equal sizes on all processes.

        Examples:
            >>> tokens = torch.arange(3 + accelerator.process_index)
            >>> tokens = accelerator.gather(accelerator.pad_across_processes(tokens, pad_index=-1))
        """
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    flag_tensor: torch.Tensor | None = None
    """This process's trigger: a scalar tensor, or `None` before the first use."""

    def set_trigger(self) -> None:
        """Raise a flag here, for `check_trigger` to see on every process.

        Examples:
            >>> accelerator.set_trigger()  # on one process
            >>> accelerator.check_trigger()  # on all of them
            True
        """
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Say, on every process alike, whether any process raised the flag since the last check, and lower it.

        Returns:
            Whether any process raised it: the same answer on all.

        Examples:
            >>> for images, labels in loader:
            ...     if not torch.isfinite(loss):
            ...         accelerator.set_trigger()
            ...     if accelerator.check_trigger():  # the same on every process
            ...         break
        """
        zero = torch.tensor(0, device=self.device)
        flag, self.flag_tensor = self.flag_tensor, zero
        return bool(collectives.reduce(zero if flag is None else flag, "sum").item())

    def skip_first_batches(self, dataloader: _LoaderT, num_batches: int = 0) -> _LoaderT:
        """Return a loader that starts after the first `num_batches` of `dataloader`.

        Args:
            dataloader: A prepared loader, or a plain one.
            num_batches: Number of batches to leave out, counted from the start of the epoch.

        Returns:
            A loader of the same kind.

        Examples:
            >>> loader = accelerator.prepare(loader)
            >>> rest = accelerator.skip_first_batches(loader, 1)
            >>> len(rest) == len(loader) - 1
            True
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    def save(self, obj: object, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object once (or once a machine, with `save_on_each_node`).

        Args:
            obj: What to save.
            f: Where.
            safe_serialization: As safetensors; `obj` is then a state dict.

        Examples:
            >>> accelerator.save({"step": 100}, "step.pt")
        """
        plain.save(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )

    def save_model(
        self,
        model: torch.nn.Module | ModelAverage,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights so that `load_checkpoint_in_model` reads them.

        Args:
            model: The model, prepared or not; or its average, which is saved in the number format of the model.
            save_directory: The folder.
            max_shard_size: Largest file, in bytes or as `"10GB"`.
            safe_serialization: As safetensors rather than torch's format.

        Examples:
            >>> model = accelerator.prepare(model)
            >>> accelerator.save_model(model, "trained")
            >>> from safetensors.torch import load_file
            >>> plain = Net()
            >>> plain.load_state_dict(load_file("trained/model.safetensors"))
            <All keys matched successfully>
        """
        shown_as = model.applied() if isinstance(model, ModelAverage) else nullcontext(model)
        with self._runtime.timed("saving"), byte_bar("Saving"), shown_as as shown:
            checkpoint.weights.save_model(
                shown,
                self._runtime.strategy.weights(self._meant_by(shown)),
                save_directory,
                max_shard_size=max_shard_size,
                safe_serialization=safe_serialization,
                save_on_each_node=self.project_configuration.save_on_each_node,
            )

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's whole state.

        Args:
            model: The model.
            unwrap: Under the bare model's names; else under those of what wraps it.

        Returns:
            The tensors by name. Of a model in shards, the first process of each machine gets them, the others get an
            empty dict.

        Examples:
            >>> model = accelerator.prepare(model)
            >>> weights = accelerator.get_state_dict(model)  # called on every process
            >>> accelerator.save(weights, "exported.safetensors", safe_serialization=True)
        """
        return self._runtime.strategy.state_dict(self._meant_by(model) if unwrap else model, unwrap=unwrap)

    def _meant_by(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module whose weights are meant: the model, or what a subclass's `unwrap_model` takes out of it."""
        inside: torch.nn.Module = self.unwrap_model(model)
        return model if inside is self._runtime.strategy.unwrap(model) else inside

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        parts: Iterable[str] | None = None,
        timeout: float = 60.0,
        **save_model_func_kwargs: object,
    ) -> Any:
        """Save models, optimizers, schedules, data positions, random states and registered objects.

        Every process calls it.

        Args:
            output_dir: The folder, or an address in an object store (`s3://bucket/run/7`); with
                `automatic_checkpoint_naming`, `checkpoints/checkpoint_<iteration>` of the project folder instead.
            safe_serialization: Weights as safetensors.
            blocking: Return when the checkpoint is complete; else return a handle at once and write meanwhile.
            parts: `("model",)` for the models alone, `("adapters",)` for the adapters of PEFT models; by default all.
            timeout: Seconds within which every process has to come.
            **save_model_func_kwargs: Passed to what writes the models.

        Returns:
            The folder or address, or with `blocking=False` a handle with `wait()`.

        Raises:
            RankDisagreementError: A process did not come.
            CheckpointError: It could not be written; what was there before is intact.

        Examples:
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> path = accelerator.save_state("state")
            >>> report = accelerator.load_state("state")
        """
        with self._runtime.timed("saving"):
            return self._runtime.save_state(
                output_dir,
                safe_serialization=safe_serialization,
                blocking=blocking,
                parts=parts,
                timeout=timeout,
                **save_model_func_kwargs,
            )

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        **load_model_func_kwargs: object,
    ) -> RestoreReport:
        """Restore what `save_state` saved.

        Args:
            input_dir: The folder or address; `None` takes the latest complete automatically named one.
            load_kwargs: Passed to what reads optimizers and schedules.
            strict: Refuse a checkpoint that is not whole or does not fit, on all processes and before anything changes.
            **load_model_func_kwargs: Passed to what loads the models.

        Returns:
            What was restored, missing and unexpected.

        Raises:
            CheckpointNotFoundError: There is no complete checkpoint.
            CheckpointDamagedError: A file is truncated or altered.
            CheckpointMismatchError: It does not fit.

        Examples:
            >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            >>> folder = accelerator.save_state("restored")
            >>> report = accelerator.load_state("restored")
            >>> report.missing
            []
        """
        return checkpoint.load.load_state(
            self._runtime.to_save(), input_dir, load_kwargs=load_kwargs, strict=strict, **load_model_func_kwargs
        )

    def register_for_checkpointing(self, *objects: object) -> None:
        """Save and restore these objects with the state.

        Args:
            *objects: Objects with `state_dict()` and `load_state_dict(state)`.

        Raises:
            ConfigurationError: An object lacks one of the two.

        Examples:
            >>> accelerator.register_for_checkpointing(progress)  # has state_dict and load_state_dict
        """
        self._runtime.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before `save_state` writes weights; it may change the list.

        `output_dir` is the folder in which the save is gathered: what the hook writes there is part of the checkpoint.

        Args:
            hook: Called on every process.

        Returns:
            A handle whose `remove()` takes the hook away.

        Examples:
            >>> import os
            >>> def note(models, weights, output_dir):
            ...     with open(os.path.join(output_dir, "note.txt"), "w") as file:
            ...         written = file.write("one more file of the checkpoint")
            >>> handle = accelerator.register_save_state_pre_hook(note)
            >>> folder = accelerator.save_state("noted")
            >>> handle.remove()
        """
        return _registered(self._runtime.save_state_pre_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before `load_state` loads weights; it may change the list.

        Args:
            hook: Called on every process.

        Returns:
            A handle whose `remove()` takes the hook away.

        Examples:
            >>> folder = accelerator.save_state("announced")
            >>> handle = accelerator.register_load_state_pre_hook(lambda models, input_dir: print("loading"))
            >>> report = accelerator.load_state("announced")
            loading
            >>> handle.remove()
        """
        return _registered(self._runtime.load_state_pre_hooks, hook)

    log_with = PassedOn[list[Any]]("_runtime.hub.log_with", "What `init_trackers` starts.")

    trackers = PassedOn[list[Any]](
        "_runtime.hub.trackers",
        "The trackers of the run, after `init_trackers`; those of a list that is set here log from then on.",
    )

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers.

        Args:
            project_name: Name of the project or experiment.
            config: What to record of the run's configuration; any nest of plain values.
            init_kwargs: For each tracker's name, arguments of its constructor.

        Examples:
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
            >>> accelerator.init_trackers("digits", config={"rate": 0.1})
            >>> accelerator.end_training()
        """
        self._runtime.hub.init(project_name, config, init_kwargs)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Log values to every tracker.

        Args:
            values: Names and values.
            step: The step they belong to.
            log_kwargs: For each tracker's name, arguments of its `log`.

        Examples:
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
            >>> accelerator.init_trackers("digits")
            >>> accelerator.log({"loss": 0.5, "accuracy": 0.9}, step=1)
            >>> accelerator.end_training()
        """
        self._runtime.hub.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` the library's own run object.

        Args:
            name: Name of a tracker of this run.
            unwrap: Return the library's own object.

        Returns:
            The tracker; one that does nothing on other processes than the main one, and in a run without trackers.

        Examples:
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
            >>> accelerator.init_trackers("digits")
            >>> writer = accelerator.get_tracker("tensorboard", unwrap=True)  # TensorBoard's SummaryWriter
            >>> accelerator.end_training()
        """
        return self._runtime.hub.get(name, unwrap)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Profile the block; see `ProfileKwargs`.

        Args:
            profile_handler: Replaces the run's own in this block.

        Returns:
            The block, for `with`, which gives the running profiler.

        Examples:
            >>> from accel_core.plugins.handlers import ProfileKwargs
            >>> with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
            ...     scores = model(torch.rand(2, 64))
            >>> table = profiler.key_averages().table(row_limit=5)
        """
        return profile(profile_handler or self.profile_handler or ProfileKwargs(), self.process_index)

    def end_training(self) -> None:
        """Finish the trackers and a save under way, and leave the process group; call it at the end of a script.

        Examples:
            >>> accelerator.end_training()
        """
        self._runtime.hub.finish()
        checkpoint.background.finish()  # before the process group goes over which its ranks agree
        if self._runtime.world.backend is not None:
            world.destroy()

    def __repr__(self) -> str:
        return f"Accelerator({self.num_processes} × {self.device}, {self.mixed_precision}, {self.distributed_type})"


def _registered(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _listed(parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
