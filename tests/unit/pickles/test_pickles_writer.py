"""What is written is what CPython reads as the same graph, and what is read again gives the same bytes."""

from __future__ import annotations

import collections
import datetime
import functools
import io
import pathlib
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given

from ckpttools.pickles.limits import PickleError
from ckpttools.pickles.reader import read_pickle
from ckpttools.pickles.records import Global, Object, Persistent
from ckpttools.pickles.writer import write_pickle
from tests import pickle_cases as cases

WRITTEN = [2, 4]


def reemitted(value: object, read_protocol: int, protocol: int) -> object:
    """A value after CPython -> our reader -> our writer -> CPython."""
    return pickle.loads(write_pickle(read_pickle(pickle.dumps(value, read_protocol)).value, protocol=protocol))


@pytest.mark.parametrize("protocol", WRITTEN)
@given(value=cases.plain_values())
def test_cpython_reads_plain_values_back(protocol, value):
    assert cases.same(value, pickle.loads(write_pickle(value, protocol=protocol)))


@pytest.mark.parametrize("protocol", WRITTEN)
@given(value=cases.plain_values())
def test_reading_and_writing_again_gives_the_same_bytes(protocol, value):
    once = write_pickle(value, protocol=protocol)
    assert write_pickle(read_pickle(once).value, protocol=protocol) == once


OBJECTS = [
    cases.Color.RED,
    cases.Level.HIGH,
    cases.Point(1, 2),
    cases.Settings("a", [1, 2]),
    cases.Slotted(3),
    cases.Listing([1, 2]),
    cases.Table(a=1, b=2),
    cases.WithKeywords(size=3),
    cases.BySetter(7),
    cases.Outer.Inner.ONE,
    cases.Outer.Inner,
    {cases.Color.RED: 1, (cases.Color.RED, 2): 3},
    {cases.Color.RED, cases.Level.HIGH, "a", 1, None, (1, "a")},
    frozenset({cases.Point(1, 2), b"a"}),
    collections.OrderedDict(b=1, a=[2]),
    collections.defaultdict(list, a=[1]),
    collections.Counter("hello"),
    collections.deque([1, 2, 3], maxlen=5),
    collections.deque([1, 2, 3]),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
    pathlib.PurePosixPath("/a/b"),
    functools.partial(int, base=2).func,
    range(3),
    slice(1, 2),
    complex(-0.0, 2),
    bytearray(b"abc\xff"),
    bytearray(),
    b"",
    2**5000,
    np.float64(1.5),
    np.dtype("int32"),
    [cases.Listing(range(2500)), cases.Table((str(i), i) for i in range(2500))],
    list(range(1001)),
    dict.fromkeys(range(2001)),
]


@pytest.mark.parametrize("protocol", WRITTEN)
@pytest.mark.parametrize("read_protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: f"{type(value).__name__}")
def test_objects_come_back_equal_after_a_conversion(value, read_protocol, protocol):
    again = reemitted(value, read_protocol, protocol)
    assert (type(again), again) == (type(value), value)


@pytest.mark.parametrize("protocol", WRITTEN)
@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: f"{type(value).__name__}")
def test_objects_read_and_written_again_give_the_same_bytes(value, protocol):
    once = write_pickle(read_pickle(pickle.dumps(value, protocol)).value, protocol=protocol)
    assert write_pickle(read_pickle(once).value, protocol=protocol) == once


@pytest.mark.parametrize("protocol", WRITTEN)
@pytest.mark.parametrize("read_protocol", [0, 1])
def test_objects_of_old_protocols_come_back_equal(read_protocol, protocol):
    value = [cases.Settings("a"), cases.Color.RED, collections.OrderedDict(a=1), {"s": {1, 2}}]
    assert reemitted(value, read_protocol, protocol) == value


@pytest.mark.parametrize("protocol", WRITTEN)
def test_attributes_of_an_ordered_dict_come_back(protocol):
    named = collections.OrderedDict(a=1)
    named._metadata = {"version": 1}
    again = reemitted(named, 2, protocol)
    assert (again, again._metadata) == (named, named._metadata)


@pytest.mark.parametrize("protocol", WRITTEN)
@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3), "i4")), np.array(["a", None])])
def test_arrays_come_back_equal(array, protocol):
    again = reemitted(array, 2, protocol)
    assert (again.dtype, again.tolist(), again.flags.f_contiguous) == (array.dtype, array.tolist(), array.flags.f_contiguous)


@pytest.mark.parametrize("protocol", WRITTEN)
def test_a_random_state_goes_on_where_it_was(protocol):
    generator = np.random.default_rng(7)
    again = reemitted([generator, random.getstate()], 2, protocol)
    assert (again[0].random(), again[1]) == (generator.random(), random.getstate())


@pytest.mark.parametrize("protocol", WRITTEN)
def test_shared_values_stay_shared(protocol):
    inner = cases.Settings("a")
    values = reemitted([inner, (inner,), {"k": inner}], 4, protocol)
    assert values[0] is values[1][0] is values[2]["k"]


def loops() -> dict[str, object]:
    """Values that contain themselves, in every way that CPython pickles."""
    inside_list: list[object] = []
    inside_list.append(inside_list)
    inside_tuple: list[object] = []
    inside_tuple.append((inside_tuple,))
    inside_long_tuple: list[object] = []
    inside_long_tuple.append((1, 2, 3, inside_long_tuple))
    settings = cases.Settings("a")
    settings.sizes = [settings]
    listing = cases.Listing()
    listing.append(listing)
    member = cases.Color.RED
    holder = cases.Settings("b")
    holder.sizes = {member: {"back": holder}}
    return {
        "list": inside_list,
        "tuple": inside_tuple,
        "a tuple from inside": inside_tuple[0],
        "a long tuple from inside": inside_long_tuple[0],
        "object": settings,
        "list subclass": listing,
        "dict in object": holder,
    }


def shape(value: object) -> list[str]:
    """A value as a path that unrolls its loops a few times."""
    steps = []
    while len(steps) < 12:
        steps.append(type(value).__name__)
        if isinstance(value, (list, tuple)) and value:
            value = value[-1]
        elif isinstance(value, dict):
            value = next(iter(value.values()))
        elif isinstance(value, cases.Settings):
            value = value.sizes
        else:
            break
    return steps


@pytest.mark.parametrize("protocol", WRITTEN)
@pytest.mark.parametrize("name", list(loops()))
def test_loops_stay_loops(name, protocol):
    value = loops()[name]
    assert shape(reemitted(value, protocol, protocol)) == shape(value)


class InsideItsSet:
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 7


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("protocol", WRITTEN)
def test_a_set_that_contains_itself_through_a_member_stays_one_set(kind, protocol):
    member = InsideItsSet()
    member.members = kind([member])
    again = reemitted(member.members, protocol, protocol)
    assert [m.members is again for m in again] == [True]


@pytest.mark.parametrize("protocol", WRITTEN)
def test_an_object_that_contains_itself_through_its_arguments_stays_one_object(protocol):
    inner: list[object] = []
    loop = cases.call("Settings", "a", inner, module="tests.pickle_cases")
    loop.state = {"name": "b"}
    inner.append(loop)
    again = pickle.loads(write_pickle([loop, loop], protocol=protocol))
    assert again[0] is again[1]
    assert again[0].sizes[0] is again[0]


@pytest.mark.parametrize("protocol", WRITTEN)
def test_a_value_of_any_depth_is_written(protocol):
    deep: object = None
    for _ in range(50_000):
        deep = [(deep,)]
    assert read_pickle(write_pickle(deep, protocol=protocol)).protocol == protocol


@pytest.mark.parametrize("protocol", WRITTEN)
def test_equal_texts_are_written_once_wherever_they_came_from(protocol):
    texts = ["".join(["na", "me"]), "".join(["nam", "e"])]
    assert write_pickle(texts, protocol=protocol).count(b"name") == 1


def test_members_of_a_set_come_in_the_same_order_in_every_process():
    code = (
        "import sys; from ckpttools.pickles.writer import write_pickle as w; print(w({'a', 'b', 'c', 1, None, ('d', 2)}).hex())"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "123"
    }
    assert len(outputs) == 1


def test_a_set_of_objects_is_ordered_by_what_they_hold():
    paths = [cases.call("PurePosixPath", name, module="pathlib") for name in "cab"]
    backwards = paths[::-1]
    assert write_pickle(set(paths)) == write_pickle(set(backwards))


def test_python_2_names_are_translated_for_protocol_4():
    data = write_pickle(
        [Global("__builtin__", "xrange"), Global("__builtin__", "getattr"), Global("copy_reg", "_reconstructor")], protocol=4
    )
    assert [value.__name__ for value in pickle.loads(data)] == ["range", "getattr", "_reconstructor"]


def test_a_nested_class_is_written_for_protocol_2_as_cpython_does():
    data = write_pickle(Global("tests.pickle_cases", "Outer.Inner"), protocol=2)
    assert pickle.loads(data) is cases.Outer.Inner


@pytest.mark.parametrize("protocol", WRITTEN)
def test_instances_of_old_classes_are_written(protocol):
    data = write_pickle(Object(Global("tests.pickle_cases", "Settings"), ("a", [1]), "inst"), protocol=protocol)
    assert pickle.loads(data) == cases.Settings("a", [1])


@pytest.mark.parametrize("protocol", WRITTEN)
def test_persistent_ids_are_written(protocol):
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: object) -> object:
            return ("loaded", pid)

    data = write_pickle([Persistent(("storage", "0"))], protocol=protocol)
    assert Unpickler(io.BytesIO(data)).load() == [("loaded", ("storage", "0"))]


class Tensor:
    def __init__(self, key: str) -> None:
        self.key = key


def placeholder(value: object) -> object | None:
    return (
        cases.call("Point", value.key, Persistent(value.key), module="tests.pickle_cases") if isinstance(value, Tensor) else None
    )


def test_a_value_is_replaced_wherever_it_stands():
    tensor = Tensor("0")
    value = read_pickle(write_pickle({"a": [tensor], "b": (tensor,)}, replace=placeholder)).value
    assert value["a"][0] is value["b"][0]
    assert value["a"][0].args[0] == "0"


def test_a_replacement_may_hold_more_to_replace():
    outer = Tensor("outer")

    def replace(value: object) -> object | None:
        if value is outer:
            return [Tensor("inner"), outer.key]
        return placeholder(value)

    value = read_pickle(write_pickle([outer], replace=replace)).value
    assert (value[0][0].args[0], value[0][1]) == ("inner", "outer")


def test_one_replacement_for_two_values_is_shared():
    shared = [1]
    value = read_pickle(
        write_pickle([Tensor("0"), Tensor("1")], replace=lambda v: shared if isinstance(v, Tensor) else None)
    ).value
    assert value[0] is value[1]


def test_a_value_that_is_neither_plain_nor_a_record_is_refused():
    with pytest.raises(TypeError, match="a Tensor is neither a plain value nor a record"):
        write_pickle([Tensor("0")])


def test_another_protocol_is_refused():
    with pytest.raises(ValueError, match="protocol 3 is not written"):
        write_pickle(None, protocol=3)


@pytest.mark.parametrize(
    "name", [Global("m\nos", "f"), Global("m", "f\n"), Global("\ud800", "f")], ids=["module", "name", "surrogate"]
)
def test_a_name_that_would_become_another_in_protocol_2_is_refused(name):
    with pytest.raises(PickleError) as caught:
        write_pickle(name)
    assert caught.value.code == "bad-pickle"


def test_an_integer_of_more_than_255_bytes_is_written():
    assert pickle.loads(write_pickle(-(2**3000))) == -(2**3000)


def test_more_than_256_memo_entries_are_written():
    value = [[i] for i in range(300)]
    value += value
    again = pickle.loads(write_pickle(value))
    assert (again, again[299] is again[599]) == (value, True)


torch = pytest.importorskip("torch")


@pytest.mark.interop
def test_a_torch_state_dict_written_again_loads_with_weights_only():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    value = {
        "model": module.state_dict(),
        "tied": [module[0].weight, module[0].weight],
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "complex": 1j,
        "array": bytearray(b"x"),
        "step": 2**40,
        "tensor": torch.arange(4).to(torch.uint16),
    }
    saved = io.BytesIO()
    torch.save(value, saved)
    loaded = torch.load(io.BytesIO(with_pickle_written_again(saved.getvalue())), weights_only=True)
    assert list(loaded["model"]) == list(value["model"])
    assert loaded["model"]._metadata == value["model"]._metadata
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in value["model"].items())
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
    rest = ["dtype", "size", "bytes", "set", "complex", "array", "step"]
    assert [loaded[name] for name in rest] == [value[name] for name in rest]
    assert torch.equal(loaded["tensor"], value["tensor"])


def with_pickle_written_again(data: bytes) -> bytes:
    """A torch file with its data.pkl read and written by us."""
    reader, out = torch._C.PyTorchFileReader(io.BytesIO(data)), io.BytesIO()
    writer = torch._C.PyTorchFileWriter(out)
    for name in reader.get_all_records():
        record = reader.get_record(name)
        if name == "data.pkl":
            record = write_pickle(read_pickle(record).value)
        if name not in ("version", ".data/serialization_id"):
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return out.getvalue()


@pytest.mark.interop
@pytest.mark.parametrize("protocol", WRITTEN)
def test_a_dcp_manifest_written_again_is_equal_for_torch(protocol):
    path = cases.FIXTURES / "torch" / "dcp_fsdp2_w4_uneven" / "ckpt" / ".metadata"
    data = path.read_bytes()
    assert pickle.loads(write_pickle(read_pickle(data).value, protocol=protocol)) == pickle.loads(data)


def test_every_fixture_written_again_reads_as_the_same_value():
    different = []
    for name, data, start in cases.fixture_pickles():
        try:
            value = read_pickle(data, offset=start).value
        except PickleError:
            continue
        protocol = 4 if name.endswith(".metadata") else 2
        once = write_pickle(value, protocol=protocol)
        again = read_pickle(once).value
        if not cases.same_graph(value, again) or write_pickle(again, protocol=protocol) != once:
            different.append(name)
    assert different == []
