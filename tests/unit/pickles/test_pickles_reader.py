"""What CPython pickles is read back as it was; objects become records, and nothing is imported or called."""

from __future__ import annotations

import collections
import datetime
import gc
import io
import pathlib
import pickle
import pickletools
import struct
import subprocess
import sys
import threading

import pytest
from hypothesis import given

from ckpttools.pickles import machine, reader
from ckpttools.pickles.reader import PickleError, read_pickle
from ckpttools.pickles.records import NO_STATE, Global, Object, Persistent, SetBy
from ckpttools.pickles.writer import write_pickle
from tests import pickle_cases as cases


def read(value: object, protocol: int = 4) -> object:
    return read_pickle(pickle.dumps(value, protocol)).value


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
@given(value=cases.plain_values())
def test_plain_values_are_read_back_as_they_were(protocol, value):
    assert cases.same(value, read(value, protocol))


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
def test_shared_values_stay_shared(protocol):
    inner = [1]
    first, second = read([inner, inner], protocol)
    assert first is second


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
def test_cycles_stay_cycles(protocol):
    loop: list[object] = []
    loop.append(({"loop": loop},))
    value = read(loop, protocol)
    assert value[0][0]["loop"] is value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_object_is_a_class_and_its_state(protocol):
    value = read(cases.Settings("a", [1]), protocol)
    assert (str(value.callable), value.args, value.how) == ("tests.pickle_cases.Settings", (), "newobj")
    assert value.state == {"name": "a", "sizes": [1]}


@pytest.mark.parametrize("protocol", [0, 1])
def test_an_object_of_protocol_0_names_its_class_as_an_argument(protocol):
    value = read(cases.Settings("a", [1]), protocol)
    assert value.args == (Global("tests.pickle_cases", "Settings"), Global("__builtin__", "object"), None)


def test_an_object_with_slots_has_a_state_of_two_parts():
    assert read(cases.Slotted(3), 2).state == (None, {"size": 3})


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
def test_an_ordered_dict_is_an_object_with_pairs(protocol):
    value = read(collections.OrderedDict(a=1, b=2), protocol)
    assert (str(value.callable), value.pairs) == ("collections.OrderedDict", [("a", 1), ("b", 2)])


def test_attributes_of_an_ordered_dict_are_its_state():
    named = collections.OrderedDict(a=1)
    named._metadata = {"version": 1}
    assert read(named, 2).state == {"_metadata": {"version": 1}}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_items_of_a_list_subclass_are_the_items_of_an_object(protocol):
    assert read(cases.Listing([1, 2, 3]), protocol).items == [1, 2, 3]


def test_items_that_come_in_batches_are_all_there():
    assert read(cases.Listing(range(2500))).items == list(range(2500))


def test_pairs_that_come_in_batches_are_all_there():
    assert len(read(cases.Table((str(i), i) for i in range(2500))).pairs) == 2500


@pytest.mark.parametrize("protocol", [4, 5])
def test_keyword_arguments_are_kept(protocol):
    value = read(cases.WithKeywords(size=3), protocol)
    assert (value.how, value.args, value.kwargs) == ("newobj_ex", (), {"size": 3})


def test_a_state_that_a_function_sets_is_kept_with_the_function():
    value = read(cases.BySetter(7))
    assert isinstance(value.state, SetBy)
    assert (str(value.state.setter), value.state.state) == ("tests.pickle_cases.set_state", 7)


def test_objects_without_state_say_so():
    assert read(pathlib.PurePosixPath("/a/b")).state is NO_STATE


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
def test_persistent_ids_are_kept(protocol):
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return "id" if isinstance(value, datetime.date) else None

    out = io.BytesIO()
    Pickler(out, protocol).dump([datetime.date(2026, 1, 2)])
    (value,) = read_pickle(out.getvalue()).value
    assert isinstance(value, Persistent)
    assert value.pid == "id"


def test_every_name_is_reported():
    pickled = read_pickle(pickle.dumps([datetime.date(2026, 1, 2), collections.OrderedDict], 2))
    assert pickled.globals == {
        Global("datetime", "date"),
        Global("_codecs", "encode"),
        Global("collections", "OrderedDict"),
    }


def test_a_name_reached_by_getattr_is_reported():
    names = read_pickle(pickle.dumps(cases.Outer.Inner, 2)).globals
    assert Global("tests.pickle_cases", "Outer.Inner") in names


def test_a_name_reached_by_getattr_twice_is_reported():
    data = b"c__builtin__\ngetattr\np0\n(g0\n(cm\nA\nS'b'\ntRS'c'\ntR."
    assert Global("m", "A.b.c") in read_pickle(data).globals


def test_getattr_of_an_object_is_reported_as_such():
    data = b"c__builtin__\ngetattr\n(cm\nf\n)RS'g'\ntR."
    assert Global("builtins", "getattr(...)") in read_pickle(data).globals


def test_a_call_of_what_a_call_returned_is_reported():
    assert Global("builtins", "call(...)") in read_pickle(b"cm\nf\n)R)R.").globals


def test_a_call_of_what_getattr_reached_is_a_call_of_that_name():
    names = read_pickle(b"c__builtin__\ngetattr\n(cm\nA\nS'b'\ntR)R.").globals
    assert Global("m", "A.b") in names
    assert not [name for name in names if "(...)" in name.name]


def test_pickles_in_one_buffer_are_read_one_after_the_other():
    data = b"junk" + pickle.dumps([1], 2) + pickle.dumps({"a": 2}, 4) + b"more"
    first = read_pickle(data, offset=4)
    second = read_pickle(data, offset=first.stop)
    assert (first.value, second.value, data[second.stop :]) == ([1], {"a": 2}, b"more")


def test_a_memoryview_is_read_like_bytes():
    data = b"junk" + pickle.dumps([1], 2) + b"more"
    pickled = read_pickle(memoryview(data), offset=4)
    assert (pickled.value, data[pickled.stop :]) == ([1], b"more")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_protocol_is_reported(protocol):
    assert read_pickle(pickle.dumps(1, protocol)).protocol == protocol


def test_a_memo_with_gaps_is_read():
    data = pickle.dumps([["a"], ["b"], "a"], 2).replace(b"q\x03", b"r\xff\xff\xff\xff")
    assert read_pickle(data).value == [["a"], ["b"], "a"]


def test_a_memo_that_starts_at_one_is_read():
    assert read_pickle(b"(lp1\nS'a'\np2\nag2\na.").value == ["a", "a"]


def test_memoize_after_a_gap_counts_the_entries():
    data = b"\x80\x04]r\x07\x00\x00\x00\x8c\x01a\x94ah\x01a."
    assert read_pickle(data).value == pickle.loads(data) == ["a", "a"]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"S'a\\x41\\n\\'\\\\'\n.", "aA\n'\\"),
        (b'S"\\101"\n.', "A"),
        (b"U\x02\xc3\xa4.", "ä"),
        (b"U\x01\xff.", b"\xff"),
        (b"T\x01\x00\x00\x00a.", "a"),
        (b"L5L\n.", 5),
        (b"L-5\n.", -5),
        (b"I00\n.", False),
        (b"I01\n.", True),
        (b"I1\n.", 1),
        (b"F1.5\n.", 1.5),
        (b"Vr\xe9\\u20ac\n.", "ré€"),
        (b"(I1\nI2\nt.", (1, 2)),
        (b"(S'k'\nI2\nd.", {"k": 2}),
        (b"(I1\nI2\n1I3\n.", 3),
        (b"(0I3\n.", 3),
        (b"I3\n2\x86.", (3, 3)),
    ],
)
def test_opcodes_of_old_writers_are_read(data, value):
    assert read_pickle(data).value == value


@pytest.mark.parametrize("data", [b"(icmod\nCls\n.", b"(imod\nCls\n.", b"(cmod\nCls\no."])
def test_instances_of_old_classes_are_objects(data):
    assert read_pickle(data).value.how == "inst"


def test_an_instance_of_an_old_class_has_its_arguments():
    value = read_pickle(b"(I1\nI2\nimod\nCls\n.").value
    assert (value.callable, value.args) == (Global("mod", "Cls"), (1, 2))


def test_python_2_names_are_kept_as_they_are():
    assert read_pickle(b"c__builtin__\nxrange\n.").value == Global("__builtin__", "xrange")


@pytest.mark.parametrize(
    "value",
    [
        cases.call("encode", "\u20ac", "latin1", module="_codecs"),
        cases.call("encode", "a", "rot13", module="_codecs"),
        cases.call("complex", "1j"),
        cases.call("set", "abc"),
        cases.call("bytearray", 10**9),
        cases.call("bytes", 10**9),
        cases.call("frozenset", [1], [2]),
    ],
    ids=lambda value: value.type_name,
)
def test_a_plain_call_with_other_arguments_stays_an_object(value):
    assert cases.same(value, read_pickle(write_pickle(value, protocol=4)).value)


def test_every_opcode_is_read_or_refused_by_name():
    inline = [line for line in pathlib.Path(reader.__file__).read_text().splitlines() if " op == 0x" in line]
    codes = {int(text[:2], 16) for line in inline for text in line.split("op == 0x")[1:]}
    assert {ord(opcode.code) for opcode in pickletools.opcodes} == codes | set(machine.RARE)


def test_nothing_named_in_a_pickle_is_imported(tmp_path):
    module = tmp_path / "imported_by_mistake.py"
    module.write_text("import pathlib\npathlib.Path(__file__).with_name('was_imported').touch()\n")
    code = """if True:
        import sys
        from ckpttools.pickles.reader import read_pickle
        from ckpttools.pickles.writer import write_pickle
        before = set(sys.modules)
        value = read_pickle(sys.stdin.buffer.read()).value
        write_pickle(value, protocol=4)
        print(sorted(set(sys.modules) - before), str(value[0].callable))
    """
    data = b"(lcimported_by_mistake\nf\n)Racwave\nopen\n)Racos\nsystem\n(S'touch was_called'\ntRa."
    done = subprocess.run([sys.executable, "-c", code], input=data, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[] imported_by_mistake.f"
    assert [path.name for path in tmp_path.iterdir()] == [module.name]


def test_the_garbage_collector_is_on_again_after_an_error():
    gc.enable()
    with pytest.raises(PickleError):
        read_pickle(b"\x80\x02")
    assert gc.isenabled()


def test_a_garbage_collector_that_was_off_stays_off():
    gc.disable()
    try:
        read_pickle(pickle.dumps([1]))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_may_read_at_once():
    data = pickle.dumps([{"k": list(range(50))} for _ in range(500)], 2)
    expected, got = pickle.loads(data), []
    threads = [
        threading.Thread(target=lambda: got.extend(read_pickle(data).value == expected for _ in range(5))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (got, gc.isenabled()) == ([True] * 20, True)


def test_a_frame_may_be_followed_by_bytes_outside_of_frames():
    value = [b"x" * 100_000, "after"]
    assert read(value, 5) == value


def test_records_have_a_short_repr_whatever_they_hold():
    value: object = Global("m", "f")
    for _ in range(100_000):
        value = Object(value, (value,))
    assert len(repr(value)) < 50


def test_a_frame_length_of_zero_is_allowed():
    assert read_pickle(b"\x80\x04\x95" + struct.pack("<Q", 0) + b"N.").value is None
