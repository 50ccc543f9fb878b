"""Records of common classes are read as what they are, and walking a hostile value ends."""

from __future__ import annotations

import collections
import pathlib
import pickle

import pytest

from ckpttools.pickles.limits import PickleError
from ckpttools.pickles.reader import read_pickle
from ckpttools.pickles.records import Global, Object, Persistent, SetBy
from ckpttools.pickles.views import (
    attributes,
    children,
    class_is,
    class_of,
    kind_of,
    mapping_items,
    ordered,
    outline,
    reachable,
    sequence_items,
    walk,
)
from tests import pickle_cases as cases

torch = pytest.importorskip("torch")


def read(value: object, protocol: int = 2) -> object:
    return read_pickle(pickle.dumps(value, protocol)).value


def named_dict() -> collections.OrderedDict[str, int]:
    made = collections.OrderedDict(a=1)
    made._metadata = {"version": 1}
    return made


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": 1},
        collections.OrderedDict(),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=1),
        collections.Counter("aab"),
        collections.Counter(),
        named_dict(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mappings_give_their_items(value, protocol):
    assert mapping_items(read(value, protocol)) == list(value.items())


def test_a_dict_subclass_gives_its_items():
    assert mapping_items(read(cases.Table(a=1))) == [("a", 1)]


def test_an_ordered_dict_of_python_2_gives_its_items():
    value = cases.call("OrderedDict", [["a", 1], ["b", 2]], module="collections")
    assert mapping_items(value) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("value", [[], (), set(), "a", None, cases.call("f", 1), Global("m", "f")])
def test_what_is_no_mapping_gives_no_items(value):
    assert mapping_items(value) is None


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        [],
        [1],
        (1, 2),
        torch.Size([]),
        torch.Size([2, 3]),
        collections.deque([1, 2]),
        collections.deque([1, 2], 5),
        {3, 1, 2},
        frozenset("ba"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sequences_give_their_items(value, protocol):
    assert sequence_items(read(value, protocol)) == (sorted(value) if isinstance(value, (set, frozenset)) else list(value))


@pytest.mark.parametrize("value", [cases.Point(1, 2), cases.Listing([1, 2])], ids=lambda value: type(value).__name__)
def test_namedtuples_and_list_subclasses_give_their_items(value):
    assert sequence_items(read(value)) == [1, 2]


@pytest.mark.parametrize("value", [{}, "ab", b"ab", None, collections.OrderedDict(a=1), cases.Settings("a")], ids=repr)
def test_what_is_no_sequence_gives_no_items(value):
    assert sequence_items(read(value)) is None


def test_attributes_are_those_of_the_state():
    assert attributes(read(cases.Settings("a", [1]))) == {"name": "a", "sizes": [1]}


def test_attributes_in_slots_are_attributes():
    assert attributes(read(cases.Slotted(3))) == {"size": 3}


def test_attributes_of_both_kinds_are_put_together():
    assert attributes(Object(Global("m", "A"), (), state=({"a": 1}, {"b": 2}))) == {"a": 1, "b": 2}


def test_a_key_that_is_no_name_is_given_as_text():
    assert attributes(Object(Global("m", "A"), (), state={0: "a"})) == {"0": "a"}


def test_a_state_that_is_a_mapping_object_gives_attributes():
    state = Object(Global("collections", "OrderedDict"), (), pairs=[("a", 1)])
    assert attributes(Object(Global("m", "A"), (), state=state)) == {"a": 1}


def test_a_state_that_a_function_sets_gives_attributes():
    assert attributes(Object(Global("m", "A"), (), state=SetBy(Global("m", "f"), {"a": 1}))) == {"a": 1}


@pytest.mark.parametrize("state", [None, 3, (1, 2, 3), ("a", "b"), (None, None)], ids=repr)
def test_a_state_of_another_form_gives_no_attributes(state):
    assert attributes(Object(Global("m", "A"), (), state=state)) is None


@pytest.mark.parametrize("value", [Object(Global("m", "A"), ()), {"a": 1}, None, Global("m", "A")], ids=repr)
def test_what_has_no_state_has_no_attributes(value):
    assert attributes(value) is None


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
def test_the_class_is_the_same_in_every_protocol(protocol):
    assert class_of(read(cases.Settings("a"), protocol)) == Global("tests.pickle_cases", "Settings")


def test_a_class_is_matched_in_any_of_its_modules():
    value = Object(Global("torch.distributed._tensor", "DTensor"), ())
    assert class_is(value, "DTensor", {"torch.distributed.tensor", "torch.distributed._tensor"})


@pytest.mark.parametrize(
    "value", [Object(Global("m", "DTensor"), ()), Object(Object(Global("m", "f"), ()), ()), Global("torch", "DTensor"), None]
)
def test_another_class_is_not_matched(value):
    assert not class_is(value, "DTensor", {"torch"})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, "int"),
        (True, "bool"),
        (None, "NoneType"),
        ({}, "dict"),
        (collections.OrderedDict(), "collections.OrderedDict"),
        (cases.Settings("a"), "tests.pickle_cases.Settings"),
        (range(3), "builtins.range"),
        (torch.Size([1]), "torch.Size"),
        (pathlib.PurePosixPath("/a"), "pathlib.PurePosixPath"),
        (cases.Outer.Inner, "tests.pickle_cases.Outer.Inner"),
    ],
    ids=repr,
)
def test_kinds_are_named_for_people(value, kind):
    assert kind_of(read(value)) == kind


def test_an_attribute_of_a_class_is_named_for_people():
    assert kind_of(cases.call("getattr", Global("m", "Enum"), "ONE")) == "m.Enum.ONE"


def test_the_kind_of_a_call_of_a_call_is_short():
    value: object = Global("m", "f")
    for _ in range(100_000):
        value = Object(value, ())
    assert kind_of(value) == "m.f(...)(...)(...)"


def test_walk_gives_leaves_with_their_typed_keys():
    value = read({"a": [1, (2, {})], 0: collections.OrderedDict(b=None), ("x", 1): torch.Size([5])})
    assert list(walk(value, lambda _: False)) == [
        (("a", 0), 1),
        (("a", 1, 0), 2),
        (("a", 1, 1), {}),
        ((0, "b"), None),
        ((("x", 1), 0), 5),
    ]


def test_walk_stops_where_it_is_told_to():
    assert list(walk({"a": (1, 2), "b": [3]}, lambda value: isinstance(value, tuple))) == [(("a",), (1, 2)), (("b", 0), 3)]


def test_keys_that_are_records_are_names_in_a_path():
    ((path, _),) = walk({(Global("torch", "float32"), 1): None}, lambda _: False)
    assert path == (("torch.float32", 1),)


def doubling(levels: int) -> object:
    value: object = []
    for _ in range(levels):
        value = [value, value]
    return value


def test_walk_refuses_a_value_that_doubles_at_each_level():
    with pytest.raises(PickleError, match="more than 1000 parts") as caught:
        list(walk(doubling(60), lambda _: False, max_nodes=1000))
    assert caught.value.code == "pickle-limit"


def test_walk_refuses_a_value_that_is_too_deep():
    value: object = 1
    for _ in range(1000):
        value = [value]
    with pytest.raises(PickleError, match="500 levels"):
        list(walk(value, lambda _: False))


def test_walk_refuses_a_value_that_contains_itself():
    value: list[object] = []
    value.append({"a": (value,)})
    with pytest.raises(PickleError, match="contains itself"):
        list(walk(value, lambda _: False))


def test_walk_lets_shared_values_pass():
    shared = [1]
    assert len(list(walk([shared, shared], lambda _: False))) == 2


def test_reachable_gives_each_part_once_however_it_is_shared():
    assert len(list(reachable(doubling(60)))) == 61


def test_reachable_finds_what_is_anywhere_in_an_object():
    ids = [Persistent(str(n)) for n in range(8)]
    inner = Object(ids[0], (ids[1],), "newobj_ex", {"k": ids[2]}, SetBy(ids[3], ids[4]), [ids[5]], [(ids[6], ids[7])])
    found = {part.pid for part in reachable([{"a": inner}]) if isinstance(part, Persistent)}
    assert found == {str(n) for n in range(8)}


def test_reachable_ends_for_a_value_that_contains_itself():
    value: dict[str, object] = {}
    value["a"] = value
    assert list(reachable(value)) == [value]


def test_a_plain_value_has_no_children():
    assert children("abc") == children(5) == []


@pytest.mark.parametrize("value", [doubling(60), Object(Global("m", "f"), (doubling(60),)), {"a": doubling(60)}])
def test_an_outline_is_short_whatever_the_value_is(value):
    assert len(outline(value)) < 2000


def test_an_outline_shows_the_parts_in_order():
    assert outline({"a": [1, "b"], "c": Object(Global("m", "f"), (None,))}) == "dict of 2 'a' list of 2 1 'b' 'c' m.f None"


def test_the_order_of_a_set_does_not_depend_on_how_it_was_filled():
    members = [1, "a", None, b"b", 2.5, ("a", 1), frozenset("xy"), Global("m", "f")]
    backwards = members[::-1]
    assert ordered(set(members)) == ordered(set(backwards))


def test_long_texts_in_a_mixed_set_are_told_apart():
    members = ["x" * 1000 + tail for tail in "abcdef"]
    assert [m for m in ordered({*members, 1}) if m != 1] == members
