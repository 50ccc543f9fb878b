"""Harmed DCP directories: whatever the bytes, the answer is findings or one clear error, never another exception."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttools.errors import CkpttoolsError
from ckpttools.findings import CODES
from ckpttools.operations.validate import Validation, validate
from tests.fixture_cases import Case

CASES = ("dcp_fsdp2_w2_model_only_bf16", "dcp_no_collectives_w2", "dcp_safetensors_format_w2", "dcp_zstd_ext_w2")
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=CASES)
def snapshot(request, tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("dcp") / "ckpt"
    shutil.copytree(Case("torch", request.param).checkpoint, copy)
    return copy


def files(snapshot: Path) -> list[Path]:
    return sorted(p for p in snapshot.rglob("*") if p.is_file())


def answer(snapshot: Path, file: Path, data: bytes) -> Validation | None:
    """What `validate` says while a file has other bytes; None for one clear error."""
    before = file.read_bytes()
    file.write_bytes(data)
    try:
        result = validate(str(snapshot), memory_bytes=1 << 20)
    except CkpttoolsError:
        return None
    finally:
        file.write_bytes(before)
    assert {f.code for f in result.findings} <= set(CODES)
    return result


@few
@given(st.data())
def test_one_byte_changed_is_answered(snapshot, data):
    file = data.draw(st.sampled_from(files(snapshot)))
    harmed = bytearray(file.read_bytes())
    harmed[data.draw(st.integers(0, len(harmed) - 1))] = data.draw(st.integers(0, 255))
    answer(snapshot, file, bytes(harmed))


@few
@given(st.data())
def test_bytes_of_the_manifest_changed_are_answered(snapshot, data):
    file = data.draw(st.sampled_from([f for f in files(snapshot) if f.name.endswith(".metadata")]))
    harmed = bytearray(file.read_bytes())
    places = st.tuples(st.integers(0, len(harmed) - 1), st.sampled_from(b"\x00\x01(.KRbu\x7f\x85\xff"))
    for at, value in data.draw(st.lists(places, min_size=1, max_size=6)):
        harmed[at] = value
    answer(snapshot, file, bytes(harmed))


@few
@given(st.data())
def test_cut_file_is_never_ok(snapshot, data):
    file = data.draw(st.sampled_from([f for f in files(snapshot) if f.suffix == ".distcp" or f.name.endswith(".metadata")]))
    whole = file.read_bytes()
    result = answer(snapshot, file, whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert result is None or result.verdict != "ok"
