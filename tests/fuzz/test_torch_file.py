"""Harmed torch files: whatever the bytes, the answer is findings or one clear error, never another exception."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttools.errors import CkpttoolsError
from ckpttools.findings import CODES
from ckpttools.operations.validate import Validation, validate
from tests.unit.containers.torch_bytes import rezipped, saved

_VALUE = {
    "w": torch.arange(12.0).reshape(3, 4).t(),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "z": torch.tensor([1 + 2j]).conj(),
    "u": torch.tensor([1, 2, 60000], dtype=torch.uint16),
    "s": torch.eye(2).to_sparse(),
    "n": [1, "two", 3.0, None, {"k": (torch.tensor(7.5), b"x")}],
}
SEEDS = {
    "zip": saved(_VALUE),
    "deflated": rezipped(saved(_VALUE), method=8),
    "stream": saved({k: v for k, v in _VALUE.items() if k != "u"}, _use_new_zipfile_serialization=False),
    "module": saved(torch.nn.Linear(2, 3)),
    "protocol 4": saved(_VALUE, pickle_protocol=4),
}
few = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.sampled_from(sorted(SEEDS))


def answer(directory: Path, data: bytes) -> Validation | None:
    """What `validate` says; None for one clear error."""
    file = directory / "w.pt"
    file.write_bytes(data)
    try:
        result = validate(str(file), memory_bytes=1 << 20)
    except CkpttoolsError:
        return None
    assert {f.code for f in result.findings} <= set(CODES)
    return result


@few
@given(seeds, st.data())
def test_one_byte_changed_is_answered(tmp_path, seed, data):
    harmed = bytearray(SEEDS[seed])
    harmed[data.draw(st.integers(0, len(harmed) - 1))] = data.draw(st.integers(0, 255))
    answer(tmp_path, bytes(harmed))


@few
@given(seeds, st.data())
def test_several_bytes_changed_are_answered(tmp_path, seed, data):
    harmed = bytearray(SEEDS[seed])
    places = st.tuples(st.integers(0, len(harmed) - 1), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 0x2E, 0x52, 0x75]))
    for at, value in data.draw(st.lists(places, min_size=1, max_size=8)):
        harmed[at] = value
    answer(tmp_path, bytes(harmed))


@few
@given(seeds, st.data())
def test_cut_file_is_never_ok(tmp_path, seed, data):
    result = answer(tmp_path, SEEDS[seed][: data.draw(st.integers(0, len(SEEDS[seed]) - 1))])
    assert result is None or result.verdict != "ok"


@few
@given(seeds, seeds, st.data())
def test_piece_of_one_file_in_another_is_answered(tmp_path, seed, other, data):
    into, out_of = SEEDS[seed], SEEDS[other]
    start = data.draw(st.integers(0, len(into)))
    length = data.draw(st.integers(0, 200))
    taken = data.draw(st.integers(0, len(out_of)))
    answer(tmp_path, into[:start] + out_of[taken : taken + length] + into[start + data.draw(st.sampled_from([0, length])) :])


@few
@given(st.binary(max_size=200), st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04\x95", b"\x80\x02\x8a\x0a"]))
def test_any_bytes_are_answered(tmp_path, data, start):
    answer(tmp_path, start + data)


@pytest.mark.parametrize("seed", sorted(SEEDS))
def test_every_29th_byte_changed_is_answered(tmp_path, seed):
    sound = answer(tmp_path, SEEDS[seed])
    assert sound is not None
    assert "ok" == sound.verdict
    for at in range(0, len(SEEDS[seed]), 29):
        harmed = bytearray(SEEDS[seed])
        harmed[at] ^= 0x10
        answer(tmp_path, bytes(harmed))
