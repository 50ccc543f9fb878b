"""Diff of harmed files: an answer or one clear error, and never `same` for what is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttools.cli.documents import diff as document_of
from ckpttools.errors import CkpttoolsError
from ckpttools.findings import CODES
from ckpttools.operations.diff import STATUSES, Diff, diff
from ckpttools.operations.sealing import hash_tensors
from tests.fixture_cases import Case

CASES = ("dcp_fsdp2_w2_model_only_bf16", "dcp_safetensors_format_w2", "save_training_full", "safetensors_all_dtypes")
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=CASES)
def snapshots(request, tmp_path_factory) -> tuple[Path, Path]:
    """A sound snapshot, and a copy to harm."""
    case = Case("torch", request.param)
    sound = next(case.targets()).path
    copy = tmp_path_factory.mktemp("copy") / sound.name
    shutil.copytree(sound, copy) if sound.is_dir() else shutil.copyfile(sound, copy)
    return sound, copy


def files(snapshot: Path) -> list[Path]:
    return [snapshot] if snapshot.is_file() else sorted(p for p in snapshot.rglob("*") if p.is_file())


def answer(sound: Path, copy: Path, file: Path, data: bytes) -> Diff | None:
    """What `diff` says in both directions while a file of the copy has other bytes; None for one clear error."""
    before = file.read_bytes()
    file.write_bytes(data)
    try:
        found = diff(str(sound), str(copy), memory_bytes=1 << 20)
        diff(str(copy), str(sound), memory_bytes=1 << 20)
        if found.verdict == "same":
            assert hash_tensors(str(sound)).fingerprint == hash_tensors(str(copy)).fingerprint
    except CkpttoolsError:
        return None
    finally:
        file.write_bytes(before)
    assert {f.code for f in found.findings} <= set(CODES)
    assert {t.status for t in found.tensors} <= set(STATUSES)
    assert document_of(found, has_same=True)["schema"] == "ckpttools/diff/1"
    return found


@few
@given(st.data())
def test_one_byte_changed_is_answered(snapshots, data):
    sound, copy = snapshots
    file = data.draw(st.sampled_from(files(copy)))
    harmed = bytearray(file.read_bytes())
    harmed[data.draw(st.integers(0, len(harmed) - 1))] ^= data.draw(st.integers(1, 255))
    answer(sound, copy, file, bytes(harmed))


@few
@given(st.data())
def test_a_cut_file_is_never_the_same(snapshots, data):
    sound, copy = snapshots
    file = data.draw(
        st.sampled_from([f for f in files(copy) if f.suffix in (".distcp", ".safetensors", ".pth") or f.name == ".metadata"])
    )
    whole = file.read_bytes()
    found = answer(sound, copy, file, whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert found is None or found.verdict != "same"
