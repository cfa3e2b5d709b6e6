"""Wraps the user's DataLoader subclass, keeping its type."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, cast

from torch.utils.data import DataLoader

from accel_core.errors import MissingDependencyError

_ITERATION = ("epoch", "_indices", "_stand_in")
"""Attributes of an iteration, which a loader made of another one does not take over."""
_LoaderT = TypeVar("_LoaderT", bound="DataLoaderAdapter")
_OWN = frozenset({"_indices", "_iterator", "_origin", "_stand_in"})
"""Attributes that belong to one object: a copy or a pickle makes its own."""


_stateful: dict[type[DataLoader[Any]], type[DataLoader[Any]]] = {}
"""By a user's class, the class made of it and of torchdata's loader."""


def stateful_class(user_class: type[DataLoader[Any]] = DataLoader) -> type[DataLoader[Any]]:
    """Return `torchdata.stateful_dataloader.StatefulDataLoader`, or a subclass of it and of a user's class."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise MissingDependencyError(
            f"use_stateful_dataloader=True needs torchdata's StatefulDataLoader; got {error} from its import. "
            "Install it with `pip install 'torchdata>=0.8'`."
        ) from error
    stateful = cast("type[DataLoader[Any]]", StatefulDataLoader)
    if issubclass(stateful, user_class):
        return stateful
    if issubclass(user_class, stateful):
        return user_class
    if user_class not in _stateful:
        _stateful[user_class] = type(user_class.__name__, (user_class, stateful), {})
    return _stateful[user_class]


class DataLoaderAdapter(DataLoader[Any]):
    """A `torch.utils.data.DataLoader`, of the user's own class where there is one.

    Raises:
        MissingDependencyError: `use_stateful_dataloader` without torchdata.
    """

    use_stateful_dataloader: bool = False
    _specialized: ClassVar[dict[tuple[type, type], type]] = {}
    _user_class: ClassVar[type[DataLoader[Any]]] = DataLoader

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: object = None, **kwargs: Any
    ) -> None:
        if use_stateful_dataloader:
            self.__class__ = type(self).over(stateful_class())  # first: the constructor is then torchdata's
        self.use_stateful_dataloader = use_stateful_dataloader
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        super().__init__(dataset, **kwargs)

    @classmethod
    def over(cls: type[_LoaderT], user_class: type[DataLoader[Any]]) -> type[_LoaderT]:
        """Return the common subclass of this class and of a user's loader class."""
        if user_class is DataLoader or issubclass(cls, user_class):
            return cls
        known = DataLoaderAdapter._specialized
        if (cls, user_class) not in known:
            body = {"__module__": cls.__module__, "_user_class": user_class, "__doc__": cls.__doc__}
            known[cls, user_class] = type(cls.__name__, (cls, user_class), body)
        return cast("type[_LoaderT]", known[cls, user_class])

    @classmethod
    def adopt(cls: type[_LoaderT], loader: DataLoader[Any], **changed: object) -> _LoaderT:
        """Return a prepared loader with everything that `loader` has: class, attributes, workers' settings, generator.

        The constructor of the user's class is not called again, and `loader` stays as it is.
        """
        user_class = loader._user_class if isinstance(loader, DataLoaderAdapter) else type(loader)
        adopted = object.__new__(cls.over(user_class))
        adopted.__dict__.update(loader.__dict__)
        adopted.__dict__.update({"_iterator": None, **changed})
        for name in _ITERATION:
            adopted.__dict__.pop(name, None)
        return adopted

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without what belongs to this object alone: iterators, and a class made for the user's."""
        state = {name: value for name, value in self.__dict__.items() if name not in _OWN}
        if "epoch" in state:
            state["epoch"] = state["epoch"].without_batches()
        own, user_class = type(self), self._user_class
        # A class made here cannot be imported by its name; the other process makes it of the same two.
        kind = own.__mro__[1] if own in DataLoaderAdapter._specialized.values() else own
        if user_class in _stateful.values():
            user_class = user_class.__mro__[1]
        return _rebuilt, (kind, user_class, {**state, "_iterator": None})

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The loader as the user's class, without what accel adds; it shares all attributes with this one."""
        plain = object.__new__(self._user_class)
        plain.__dict__ = self.__dict__
        return plain

    def state_dict(self) -> Any:
        """Return the state of the `StatefulDataLoader` behind this loader."""
        return super().state_dict()  # type: ignore[misc]

    def load_state_dict(self, state_dict: object) -> None:
        """Set the state of the `StatefulDataLoader` behind this loader."""
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: the state is kept as it was before the look-ahead, so it counts no batch that was not given."""


def _rebuilt(kind: type[DataLoaderAdapter], user_class: type[DataLoader[Any]], state: dict[str, Any]) -> object:
    """Build a loader around the attributes of another one."""
    if state["use_stateful_dataloader"]:
        user_class = stateful_class(user_class)
    made = object.__new__(kind.over(user_class))
    made.__dict__.update(state)
    return made
