"""Pickles that are broken or made to harm: a PickleError with its code and its byte, in little time and memory."""

from __future__ import annotations

import pickle
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.pickles.limits import Limits
from ckpttools.pickles.reader import PickleError, read_pickle


def refusal(data: bytes, **options: object) -> PickleError:
    with pytest.raises(PickleError) as caught:
        read_pickle(data, **options)
    return caught.value


def uint32(number: int) -> bytes:
    return struct.pack("<I", number)


def uint64(number: int) -> bytes:
    return struct.pack("<Q", number)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated"),
        (b"\x80", "truncated"),
        (b"\x80\x04K", "truncated"),
        (b"\x80\x04J\x00\x00", "truncated"),
        (b"\x80\x04G\x00\x00", "truncated"),
        (b"\x80\x04X\x00", "truncated"),
        (b"\x80\x04N", "truncated"),
        (b"\x80\x06N.", "protocol 6"),
        (b"X" + uint32(5) + b"abc", "past the end"),
        (b"X" + uint32(0xFFFFFFFF) + b"abc.", "past the end"),
        (b"\x8c\x05abc", "past the end"),
        (b"\x8d" + uint64(2**63) + b".", "past the end"),
        (b"B" + uint32(0xFFFFFFFF) + b".", "past the end"),
        (b"\x8e" + uint64(2**64 - 1) + b".", "past the end"),
        (b"\x96" + uint64(2**40) + b".", "past the end"),
        (b"T" + uint32(0xFFFFFFFF) + b".", "past the end"),
        (b"\x8a\x05\x01.", "past the end"),
        (b"\x8b" + uint32(0x7FFFFFFF) + b".", "past the end"),
        (b"\x95" + uint64(2**63) + b"N.", "past the end"),
        (b"I5", "past the end"),
        (b"cos\nsystem", "past the end"),
        (b"\x95" + uint64(11) + b"\x95" + uint64(2) + b"N.", "a frame inside a frame"),
        (b"?.", "unknown opcode 0x3f"),
        (b"\xff.", "unknown opcode 0xff"),
        (b"I5x\n.", "`5x` is not an integer"),
        (b"I\xb2\n.", "is not an integer"),
        (b"L 5\n.", "is not an integer"),
        (b"Fx\n.", "could not convert"),
        (b"F\xff\n.", "UnicodeDecodeError"),
        (b"S'abc\n.", "without its quotes"),
        (b"Sabc\n.", "without its quotes"),
        (b"S'\n.", "without its quotes"),
        (b"V\\u12\n.", "UnicodeDecodeError"),
        (b"X\x01\x00\x00\x00\xff.", "UnicodeDecodeError"),
        (b"\x8c\x02\xc3(.", "UnicodeDecodeError"),
        (b"c\xff\nf\n.", "UnicodeDecodeError"),
        (b"P\xff\n.", "UnicodeDecodeError"),
        (b"\x82\x01.", "extension registry"),
        (b"\x83\x01\x00.", "extension registry"),
        (b"\x84\x01\x00\x00\x00.", "extension registry"),
        (b"\x97.", "buffer outside"),
        (b"\x98.", "buffer outside"),
        (b"K\x01K\x02\x93.", "a name that is not text"),
        (b"N)R.", "a call of a NoneType"),
        (b"X\x01\x00\x00\x00a)\x81.", "a call of a str"),
        (b"N)}\x92.", "a call of a NoneType"),
        (b"(No.", "a call of a NoneType"),
        (b"(o.", "a call of a NoneType"),
        (b"cm\nf\nNR.", "arguments that are not a tuple"),
        (b"cm\nf\n]R.", "arguments that are not a tuple"),
        (b"cm\nf\n]\x81.", "arguments that are not a tuple"),
        (b"cm\nf\n)N\x92.", "arguments that are not a tuple and a dict"),
        (b"}}b.", "a state for a dict"),
        (b"cm\nf\n}b.", "a state for a Global"),
        (b"N}b.", "a state for a NoneType"),
        (b"cm\nf\n)R}b}b.", "a second state"),
        (b"cm\nf\nNa.", "items for a Global"),
        (b")Na.", "items for a tuple"),
        (b"}(NNe.", "items for a dict"),
        (b"](NNu.", "keys for a list"),
        (b"cm\nf\nNNs.", "keys for a Global"),
        (b"}(Nu.", "a key without a value"),
        (b"(Nd.", "a key without a value"),
        (b"}(]Nu.", "of type list, which cannot be hashed"),
        (b"}}Ns.", "of type dict, which cannot be hashed"),
        (b"\x8f(]\x90.", "of type list, which cannot be hashed"),
        (b"(]\x91.", "of type list, which cannot be hashed"),
        (b"}(]\x85Nu.", "of type list, which cannot be hashed"),
        (b"c__builtin__\nset\n]]a\x85R.", "of type list, which cannot be hashed"),
        (b"}(NNNNu.", "same key twice"),
        (b"}NNsNNs.", "same key twice"),
        (b"}(K\x01N\x88Nu.", "same key twice"),
        (b".", "what the stack or the memo does not hold"),
        (b"0.", "what the stack or the memo does not hold"),
        (b"t.", "what the stack or the memo does not hold"),
        (b"1.", "what the stack or the memo does not hold"),
        (b"2.", "what the stack or the memo does not hold"),
        (b"\x94.", "what the stack or the memo does not hold"),
        (b"q\x00.", "what the stack or the memo does not hold"),
        (b"K\x01\x86.", "what the stack or the memo does not hold"),
        (b"K\x01(\x85.", "what the stack or the memo does not hold"),
        (b"K\x01(\x86.", "what the stack or the memo does not hold"),
        (b"h\x00.", "what the stack or the memo does not hold"),
        (b"j\x00\x00\x00\x00.", "what the stack or the memo does not hold"),
        (b"g0\n.", "what the stack or the memo does not hold"),
        (b"Nr\x05\x00\x00\x00h\x00.", "what the stack or the memo does not hold"),
        (b"g-1\n.", "a memo index that is not a number"),
        (b"Np-1\n.", "a memo index that is not a number"),
        (b"gx\n.", "a memo index that is not a number"),
        (b"g\xb2\n.", "a memo index that is not a number"),
    ],
    ids=repr,
)
def test_a_pickle_that_breaks_the_rules_is_refused_with_the_reason(data, said):
    error = refusal(data)
    assert (error.code, said in str(error)) == ("bad-pickle", True), str(error)


def test_the_byte_is_that_of_the_opcode_in_the_buffer():
    assert refusal(b"junkjunk" + b"\x80\x02](K\x01?.", offset=8).position == 8 + 6


def test_the_byte_is_that_of_the_buffer_when_a_view_was_given():
    assert refusal(memoryview(b"junkjunk" + b"\x80\x02](K\x01?."), offset=8).position == 8 + 6


def test_an_input_over_the_limit_is_refused():
    data = pickle.dumps(["x" * 100] * 3 + ["y" * 1000], 2)
    error = refusal(data, limits=Limits(max_bytes=500))
    assert (error.code, "more than 500 bytes" in str(error)) == ("pickle-limit", True)


def test_what_follows_a_pickle_does_not_count_against_the_limit():
    data = pickle.dumps([1], 2)
    assert read_pickle(data + b"x" * 1000, limits=Limits(max_bytes=len(data))).value == [1]


@pytest.mark.parametrize("data", [b"\x8b" + uint32(2000) + b"\x01" * 2000 + b".", b"I" + b"1" * 5000 + b"\n."])
def test_an_integer_that_python_could_not_print_is_refused(data):
    assert refusal(data).code == "pickle-limit"


def test_every_integer_that_is_read_can_be_printed():
    value = read_pickle(b"\x8b" + uint32(1024) + b"\x7f" * 1024 + b".").value
    assert len(str(value)) < 4300


DEEP = 200_000


@pytest.mark.parametrize(
    "data",
    [
        b"}(" + b")" + b"\x85" * DEEP + b"Nu.",
        b"})" + b"\x85" * DEEP + b"Ns.",
        b"\x8f()" + b"\x85" * DEEP + b"\x90.",
        b"()" + b"\x85" * DEEP + b"\x91.",
        b"(" * DEEP + b"N" + b"\x91" * DEEP + b".",
        b"c__builtin__\nset\n])" + b"\x85" * DEEP + b"a\x85R.",
        b"}((" + b"N" * 1000 + b"tNu.",
        b"}(N" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(50)) + b"Nu.",
    ],
    ids=["setitems", "setitem", "additems", "frozenset", "frozensets", "set", "wide", "doubling"],
)
def test_keys_too_deep_or_wide_to_hash_are_refused(data):
    assert refusal(data).code == "pickle-limit"


@pytest.mark.parametrize(
    "data",
    [
        b"]" * DEEP + b"a" * (DEEP - 1) + b".",
        b")" + b"\x85" * DEEP + b".",
        b"(" * DEEP + b"N" + b"t" * DEEP + b".",
        b"(" * DEEP + b"N" + b"l" * DEEP + b".",
        b"cm\nf\n" + b")R" * DEEP + b".",
        b"N" + b"Q" * DEEP + b".",
        b"N" + b"2\x86" * DEEP + b".",
    ],
    ids=["lists", "tuple1", "tuples", "marked lists", "calls of calls", "persistent ids", "pairs"],
)
def test_deep_values_are_read_and_let_go_without_a_crash(data):
    value = read_pickle(data).value
    assert value is not None
    del value


def peak_bytes(data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(PickleError):
            read_pickle(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"Nr\xff\xff\xff\xffK",
        b"Np99999999999\nK",
        b"\x8e" + uint64(2**62) + b".",
        b"\x8b" + uint32(2**31 - 1) + b".",
        b"X" + uint32(2**32 - 1) + b".",
        b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R?",
    ],
    ids=["binput", "put", "bytes", "long", "text", "bytearray"],
)
def test_a_large_number_takes_no_memory(data):
    assert peak_bytes(data) < 100_000


def test_copies_of_one_value_again_and_again_are_refused():
    value = b"\x80\x02c__builtin__\nset\nq\x00](" + b"".join(b"M" + struct.pack("<H", i) for i in range(5000)) + b"eq\x01\x86"
    data = value + b"".join(b"h\x00h\x01\x85R" for _ in range(100)) + b"."
    assert refusal(data).code == "pickle-limit"


def test_names_reached_by_getattr_do_not_grow_without_bound():
    data = b"c__builtin__\ngetattr\nq\x000cm\nA\nX\x01\x00\x00\x00bq\x010" + b"q\x020h\x00h\x02h\x01\x86R" * 20_000 + b"."
    assert sum(len(name.name) for name in read_pickle(data).globals) < 2_000_000


@given(st.binary(max_size=60))
def test_no_other_exception_escapes(data):
    try:
        read_pickle(data)
    except PickleError as e:
        assert e.code in ("bad-pickle", "pickle-limit")  # noqa: PT017
