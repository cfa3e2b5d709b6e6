"""Names that are set, patched or deleted on an old path take effect in the engine, and come back."""

import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest

import accel_core.accelerator
import accel_core.data.prepare
import accelerate
import accelerate.accelerator
import accelerate.data_loader
import accelerate.utils
from accelerate import _rebinding


@pytest.fixture
def engine() -> Iterator[tuple[ModuleType, ModuleType]]:
    """Make a small engine: one module that defines a function, one that bound it under another name."""
    home, user = ModuleType("accel_core._rebinding_home"), ModuleType("accel_core._rebinding_user")
    exec("def act(): return 'engine'\nLIMIT = 'unlike any other'", vars(home))
    vars(user).update(_act=home.act, LIMIT=home.LIMIT, other=len)
    mirror = ModuleType("accelerate._rebinding_mirror")
    vars(mirror).update(act=home.act, LIMIT=home.LIMIT)
    for module in (home, user, mirror):
        sys.modules[module.__name__] = module
    _rebinding.write_through(mirror.__name__)
    vars(accelerate)["_rebinding_mirror"] = mirror  # mock.patch of Python 3.10 looks there
    yield home, user
    del vars(accelerate)["_rebinding_mirror"]
    for name in ("accel_core._rebinding_home", "accel_core._rebinding_user", "accelerate._rebinding_mirror"):
        del sys.modules[name]


def _mine() -> str:
    return "mine"


def test_a_constant_is_set_under_its_own_name(engine: tuple[ModuleType, ModuleType]) -> None:
    """A plain value is replaced only where it has the same name."""
    home, user = engine
    vars(home)["alias"] = home.LIMIT
    sys.modules["accelerate._rebinding_mirror"].LIMIT = "another"
    assert (home.LIMIT, user.LIMIT, home.alias) == ("another", "another", "unlike any other")


def test_a_delete_and_its_undoing_reach_every_binding(
    engine: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting takes the name away everywhere, and undoing it brings it back everywhere."""
    home, user = engine
    theirs = home.act
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["accelerate._rebinding_mirror"], "act")
        assert not hasattr(home, "act")
        assert not hasattr(user, "_act")
    assert home.act is user._act is theirs


def test_mock_patches_take_effect_and_are_undone(engine: tuple[ModuleType, ModuleType]) -> None:
    """`mock.patch` on an old path is seen by the engine inside the block only, and nested ones are undone in order."""
    home, user = engine
    theirs = home.act
    with mock.patch("accelerate._rebinding_mirror.act", _mine):
        assert user._act() == "mine"
        with mock.patch("accelerate._rebinding_mirror.act", print):
            assert user._act is print
        assert home.act is user._act is _mine
        assert user.other is len
    assert home.act is user._act is theirs


def test_new_names_stay_here() -> None:
    """A name that the engine does not know is set on the old path alone."""
    accelerate.utils.never_seen_before = 1  # type: ignore[attr-defined]
    assert not hasattr(accel_core.accelerator, "never_seen_before")
    del accelerate.utils.never_seen_before  # type: ignore[attr-defined]


def test_a_replaced_prepare_data_loader_reaches_the_engine(fresh_state: None) -> None:
    """The replacement that libraries make is what a living Accelerator prepares loaders with."""
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerate.data_loader.DataLoaderShard([1, 2, 3])
    seen: list[object] = []

    def replacement(dataloader: object, *args: object, **kwargs: object) -> object:
        seen.append(dataloader)
        return loader

    theirs = accelerate.data_loader.prepare_data_loader
    accelerate.data_loader.prepare_data_loader = replacement  # type: ignore[assignment]
    try:
        from torch.utils.data import DataLoader

        plain = DataLoader([1, 2, 3])  # type: ignore[arg-type]
        assert accelerator.prepare_data_loader(plain) is loader
        assert seen == [plain]
    finally:
        accelerate.data_loader.prepare_data_loader = theirs
    assert accel_core.data.prepare.prepare_data_loader is theirs


@pytest.mark.parametrize("name", [name for name in sorted(sys.modules) if name.partition(".")[0] == "accelerate"])
def test_every_old_path_is_rebindable(name: str) -> None:
    """All public modules of the drop-in write through."""
    if not any(part.startswith("_") for part in name.split(".")):
        assert isinstance(sys.modules[name], _rebinding.RebindableModule)


def test_a_program_is_left_alone() -> None:
    """A module that runs as a program is not made rebindable."""
    before = sys.modules["__main__"].__class__
    _rebinding.write_through("__main__")
    assert sys.modules["__main__"].__class__ is before


@pytest.fixture
def waiting(engine: tuple[ModuleType, ModuleType]) -> ModuleType:
    """Make a mirror that has a name of the small engine only when it is asked for."""
    mirror = ModuleType("accelerate._rebinding_mirror")
    sys.modules[mirror.__name__] = vars(accelerate)["_rebinding_mirror"] = mirror
    _rebinding.write_through(mirror.__name__, {"accel_core._rebinding_home": ["act"]})
    return mirror


def test_a_name_comes_when_it_is_asked_for(engine: tuple[ModuleType, ModuleType], waiting: ModuleType) -> None:
    """It is listed before, comes with the first use, and with a star import; other names are no attributes."""
    assert "act" not in vars(waiting)
    assert "act" in dir(waiting)
    assert waiting.act is engine[0].act
    assert vars(waiting)["act"] is engine[0].act
    del vars(waiting)["act"]
    space: dict[str, object] = {}
    exec("from accelerate._rebinding_mirror import *", space)
    assert space["act"] is engine[0].act
    with pytest.raises(AttributeError, match="_rebinding_mirror' has no attribute 'other'"):
        _ = waiting.other


def test_a_name_that_nobody_asked_for_is_set_in_the_engine(
    engine: tuple[ModuleType, ModuleType], waiting: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To set or delete it brings it first, so both reach the engine, and come back."""
    home, user = engine
    theirs = home.act
    waiting.act = _mine
    assert home.act is user._act is waiting.act is _mine
    waiting.act = theirs
    del vars(waiting)["act"]
    with monkeypatch.context() as patch:
        patch.delattr(waiting, "act")
        assert not hasattr(home, "act")
    assert home.act is user._act is theirs


def test_a_name_imported_under_a_patch_does_not_keep_it(
    engine: tuple[ModuleType, ModuleType], waiting: ModuleType
) -> None:
    """A mirror that is asked for a name first while another mirror's patch stands has the original, then and after."""
    theirs = engine[0].act
    other = ModuleType("accelerate._rebinding_other")
    vars(other).update(act=theirs)
    sys.modules[other.__name__] = other
    try:
        _rebinding.write_through(other.__name__)
        other.act = _mine
        assert engine[0].act is _mine
        assert waiting.act is theirs
        other.act = theirs
        assert engine[0].act is engine[1]._act is waiting.act is theirs
    finally:
        del sys.modules[other.__name__]
