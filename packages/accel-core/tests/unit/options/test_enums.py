"""The enumerations behave as configuration files, pickles and consumers expect."""

import enum
import pickle

import pytest

from accel_core.options import enums

ENUMS = [
    kind
    for kind in vars(enums).values()  # not by their module: the drop-in sets its own
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and len(kind)
]
WITH_CONTAINS = [kind for kind in ENUMS if issubclass(kind, enums.BaseEnum)]


@pytest.mark.parametrize("kind", WITH_CONTAINS, ids=lambda kind: kind.__name__)
def test_values_are_contained_and_printed(kind: type[enums.BaseEnum]) -> None:
    """A BaseEnum contains its members and their values, lists the values, and prints members as values."""
    for member in kind:
        assert member in kind
        assert member.value in kind
        assert str(member) == f"{member}" == member.value
    assert "no such value" not in kind
    assert None not in kind
    assert kind.list() == [member.value for member in kind]


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_members_survive_a_pickle(kind: type[enum.Enum]) -> None:
    """A pickled member comes back as the same object."""
    for member in kind:
        assert pickle.loads(pickle.dumps(member)) is member


def test_distributed_type_is_a_string_that_prints_as_a_member() -> None:
    """DistributedType compares equal to its value but prints with the class name."""
    assert enums.DistributedType.MULTI_GPU == "MULTI_GPU"
    assert str(enums.DistributedType.MULTI_GPU) == "DistributedType.MULTI_GPU"
