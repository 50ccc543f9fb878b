"""Whatever is done to the bytes of a real pickle, it parses or is refused with a PickleError; nothing else escapes."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttools.pickles.limits import PickleError
from ckpttools.pickles.reader import read_pickle
from ckpttools.pickles.renditions import plain
from ckpttools.pickles.table import judge
from ckpttools.pickles.views import kind_of, reachable
from ckpttools.pickles.writer import write_pickle
from tests import pickle_cases as cases

TORCH = cases.FIXTURES / "torch"
CHANGES = 200
"""Bytes changed per seed; all were, once, when the reader was written."""


def pickle_of(file: str) -> bytes:
    data = (TORCH / file).read_bytes()
    start = 0 if file.endswith(".metadata") else next(cases.zip_members(data, b"data.pkl"))
    return data[start : read_pickle(data, offset=start).stop]


SEEDS = {
    "manifest": pickle_of("dcp_fsdp2_w2_model_only_bf16/ckpt/.metadata"),
    "training": pickle_of("save_training_full/ckpt/checkpoint.pth"),
    "exotic": pickle_of("save_zip_exotic/ckpt/exotic.pt"),
    "sharded": pickle_of("fsdp1_sharded_pickle_w2/ckpt/model_sharded_rank0.pt"),
    "protocol 0": pickle.dumps([{"a": (1, 2.5, None, True, "ä", b"\xff")}, {1, 2}, cases.Settings("a")], 0),
    "protocol 5": pickle.dumps([bytearray(b"a"), frozenset({1}), cases.WithKeywords(size=2), 2**100], 5),
}


def use(data: bytes) -> bool:
    """Reads, and does with the value what others do with it. Answers whether it parsed."""
    try:
        pickled = read_pickle(data)
    except PickleError as e:
        assert e.code in ("bad-pickle", "pickle-limit")  # noqa: PT017
        return False
    for name in pickled.globals:
        judge(name)
    kinds = [kind_of(part) for part in reachable(pickled.value)]
    plain(pickled.value, max_nodes=200)
    try:
        again = read_pickle(write_pickle(pickled.value, protocol=4))
    except PickleError:
        return True
    assert sorted(kinds) or again.value is not None or pickled.value is None
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_every_prefix_is_refused(seed):
    data = SEEDS[seed]
    for stop in random.Random(0).sample(range(len(data)), min(len(data), 10 * CHANGES)):
        with pytest.raises(PickleError):
            read_pickle(data[:stop])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_changed_byte_is_survived(seed):
    data, draw = SEEDS[seed], random.Random(0)
    for place in draw.sample(range(len(data)), min(len(data), CHANGES)):
        for byte in (draw.randrange(256), data[place] ^ 1 << draw.randrange(8)):
            use(data[:place] + bytes([byte]) + data[place + 1 :])


@pytest.mark.parametrize("seed", SEEDS)
@given(cuts=st.lists(st.tuples(st.floats(0, 1), st.integers(-9, 9), st.binary(max_size=6)), min_size=1, max_size=3))
def test_bytes_put_in_and_taken_out_are_survived(seed, cuts):
    data = SEEDS[seed]
    for share, length, new in cuts:
        place = int(share * len(data))
        data = data[:place] + new + data[place + max(length, 0) :]
    use(data)


OPCODES = [bytes([code]) for code in b"()]}0123.NQRabdelostu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"]
PIECES = [
    *OPCODES,
    *(b"\x8c\x01a", b"X\x01\x00\x00\x00b", b"K\x01", b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"j\x00\x00\x00\x00"),
    *(b"c__builtin__\nset\n", b"c__builtin__\ngetattr\n", b"cm\nf\n", b"c_codecs\nencode\n", b"c__builtin__\nbytearray\n"),
    *(b"c__builtin__\ncomplex\n", b"im\nC\n", b"g0\n", b"p0\n", b"I1\n", b"F1\n", b"C\x01x", b"\x8a\x01\x01"),
]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40))
@example(pieces=[b"]", b"\x94", b"c__builtin__\nset\n", b"h\x00", b"\x85", b"R"])
def test_any_program_of_opcodes_is_survived(pieces):
    use(b"".join(pieces) + b".")
