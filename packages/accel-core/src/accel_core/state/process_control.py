"""Who does what, and when: the verbs that the process, the run and the Accelerator have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from accel_core.comm import control
from accel_core.comm.split import split_for_rank
from accel_core.errors import StateError, StateResetError
from accel_core.process.world import World, ensure, leading

if TYPE_CHECKING:
    import torch


class SharedState:
    """A state of the process that all instances share; the class that has it keeps it in `_shared_state`."""

    _shared_state: ClassVar[dict[str, Any]]
    _known_attributes: ClassVar[tuple[str, ...]]

    @property
    def initialized(self) -> bool:
        """Whether the shared state is set."""
        return self._shared_state != {}

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in self._known_attributes:
            raise StateResetError(
                f"`{kind}` object has no attribute `{name}`. This happens if the process's state was reset while "
                f"the object lived. Make a new {kind}() or Accelerator()."
            )
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")


class ProcessControl:
    """The order in which processes run, and the part of each; the class that has it knows which one this process is."""

    # Whether this is the main process of all, and of its machine, where an engine's results come to be elsewhere.
    _mains: ClassVar[tuple[bool, bool] | None] = None

    if TYPE_CHECKING:  # attributes of one class, properties of another

        @property
        def num_processes(self) -> int:
            """Number of processes."""

        @property
        def process_index(self) -> int:
            """Number of this process, from 0."""

        @property
        def local_process_index(self) -> int:
            """Number of this process on its machine."""

    @property
    def use_distributed(self) -> bool:
        """Whether several processes take part."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of all; the last rank where an engine's results come to be there, as with Megatron."""
        return (self.process_index == 0 if self._mains is None else self._mains[0]) and leading()

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine; the last one where the last rank is the main process."""
        return (self.local_process_index == 0 if self._mains is None else self._mains[1]) and leading()

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.process_index == self.num_processes - 1

    def _find_world(self) -> World:
        return ensure()

    def wait_for_everyone(self) -> None:
        """Stop until every process has come here; with one process, return at once.

        Raises:
            RankDisagreementError: Another process is in another operation, such as `gather` or `save_state`; the
                error names the line of each. (Operations that accel did not start, such as calls of
                `torch.distributed` or the backward pass of a distributed model, cannot be told apart from it: there
                the backend's own error or timeout ends the wait.)
            RemoteRankError: Another process is gone.

        Examples:
            >>> if accelerator.is_main_process:
            ...     torch.save(model.state_dict(), "everyone.pt")
            >>> accelerator.wait_for_everyone()
            >>> weights = torch.load("everyone.pt")  # every process finds the file
        """
        control.wait_for_all(self._find_world())

    @contextmanager
    def split_between_processes(
        self, inputs: list[Any] | tuple[Any, ...] | dict[str, Any] | torch.Tensor, apply_padding: bool = False
    ) -> Iterator[Any]:
        """Give each process its part of `inputs` inside the block.

        Args:
            inputs: A list or another sequence, a tensor or numpy array (split along its first dim), a dataset, or a
                dict of these with equal lengths. A text or bytes are one input, which every process gets.
            apply_padding: Repeat the last element so that every process gets equally many.

        Yields:
            This process's part, of the same type; of a sequence other than a tuple, a list.

        Raises:
            DataError: The values of a dict have different lengths.
            UnsupportedTypeError: There are several processes, and the input, or a value of a dict, has no length or
                cannot be indexed.

        Examples:
            >>> with accelerator.split_between_processes(["a", "b", "c"]) as mine:
            ...     answers = [text.upper() for text in mine]
        """
        yield split_for_rank(inputs, self.process_index, self.num_processes, apply_padding=apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process through a `with` block before all others.

        Returns:
            The block, for `with`; every process enters it.

        Raises:
            RemoteRankError: On the others, when the main process raised in the block.

        Examples:
            >>> with accelerator.main_process_first():
            ...     samples = list(data)  # the first process fills a cache, the others find it
        """
        return control.main_first(self._find_world(), self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each machine through a `with` block before the others.

        Returns:
            The block, for `with`; every process enters it.

        Examples:
            >>> with accelerator.local_main_process_first():
            ...     samples = list(data)  # one process of each machine fills its cache, the others find it
        """
        return control.main_first(self._find_world(), self.is_local_main_process)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print once per machine.

        Args:
            *args: What to print.
            **kwargs: Arguments of Python's `print`.

        Examples:
            >>> accelerator.print("loss:", 0.5)
            loss: 0.5
        """
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  what it is for


class FunctionControl(ProcessControl):
    """Functions that run on chosen processes."""

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make a function run on the main process only; elsewhere it returns `None`.

        Args:
            function: The function; without it, a decorator is returned.

        Returns:
            The function, made so.

        Examples:
            >>> @accelerator.on_main_process
            ... def report(text):
            ...     print(text)
            >>> report("printed once")
            printed once
        """
        if not getattr(self, "initialized", True):
            raise StateError(
                "on_main_process needs to know the processes; got a PartialState that was reset. "
                "Make a PartialState() or Accelerator() first."
            )
        return _only_when(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Make a function run on the first process of each machine only.

        Args:
            function: The function; without it, a decorator is returned.

        Returns:
            The function, made so.

        Examples:
            >>> @accelerator.on_local_main_process
            ... def report(text):
            ...     print(text)
            >>> report("printed once on each machine")
            printed once on each machine
        """
        return _only_when(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function run on the highest rank only.

        Args:
            function: The function.

        Returns:
            The function, made so.

        Examples:
            >>> @accelerator.on_last_process
            ... def report(text):
            ...     print(text)
            >>> report("printed by the last process")
            printed by the last process
        """
        return _only_when(self.is_last_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make a function run on the process numbered `process_index` only.

        Args:
            function: The function; without it, a decorator is returned.
            process_index: Rank of the process on which it runs.

        Returns:
            The function, made so.

        Examples:
            >>> @accelerator.on_process(process_index=0)
            ... def report(text):
            ...     print(text)
            >>> report("printed by process 0")
            printed by process 0
        """
        return _only_when(self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make a function run, on each machine, on the process numbered `local_process_index` only.

        Args:
            function: The function; without it, a decorator is returned.
            local_process_index: Number, on its machine, of the process on which it runs.

        Returns:
            The function, made so.

        Examples:
            >>> @accelerator.on_local_process(local_process_index=0)
            ... def report(text):
            ...     print(text)
            >>> report("printed by process 0 of each machine")
            printed by process 0 of each machine
        """
        return _only_when(self.local_process_index == local_process_index, function)


def _only_when(chosen: bool, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make a function run on chosen processes; without one yet, return the decorator."""
    return partial(control.only_when, chosen) if function is None else control.only_when(chosen, function)
