"""Files that lie beside checkpoints or in the place of theirs, as bug reports of other tools have them: each is told by name."""

from __future__ import annotations

import gzip
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpttools.containers.strangers import tell, tell_by_name
from ckpttools.errors import NotRecognisedError
from ckpttools.layouts import open_snapshot
from ckpttools.operations.validate import validate
from tests.fixture_cases import FIXTURES

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
PAGE = b"<!DOCTYPE html><html><head><title>Access denied</title></head></html>"
ANSWER = b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>NoSuchKey</Code></Error>"
APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(40)

HEADS = {
    "pointer": (POINTER, "Git LFS"),
    "page": (PAGE, "page"),
    "answer of a store": (ANSWER, "page"),
    "answer in JSON": (b'{"error": "Repository not found"}' + bytes(4), "page"),
    "gzip": (gzip.compress(b"weights" * 50), "gzip"),
    "zeros": (bytes(4096), "zero bytes"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
    "apple double": (APPLE_DOUBLE, "AppleDouble"),
}


def codes(location: Path) -> list[str]:
    return [f.code for f in open_snapshot(str(location)).checkpoint.findings]


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "pytorch_model.bin"])
def test_what_stands_in_the_place_of_a_file_is_named_and_not_called_a_bad_header(case: str, name: str, tmp_path: Path) -> None:
    head, word = HEADS[case]
    (tmp_path / name).write_bytes(head)

    (finding,) = [f for f in open_snapshot(str(tmp_path)).checkpoint.findings if f.is_error]

    expected = "bad-header" if name.endswith(".safetensors") else "bad-pickle"
    assert (finding.code, word in finding.found) == (expected, True), finding


@pytest.mark.parametrize("case", ["pointer", "page", "answer in JSON"])
def test_what_stands_in_the_place_of_an_index_or_manifest_is_named(case: str, tmp_path: Path) -> None:
    head, word = HEADS[case]
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(head)
    dcp = tmp_path / "dcp"
    shutil.copytree(FIXTURES / "torch/dcp_fsdp2_w2/ckpt", dcp)
    (dcp / ".metadata").write_bytes(head)

    index = next(f for f in open_snapshot(str(tmp_path)).checkpoint.findings if f.code == "bad-json")
    manifest = next(f for f in open_snapshot(str(dcp)).checkpoint.findings if f.code == "bad-pickle")

    assert word in index.found
    assert word in manifest.found


@pytest.mark.parametrize("format_name", ["safetensors", "torch"])
def test_a_file_of_the_other_format_is_told_by_its_content(format_name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # a file that is alone may have any name
    if format_name == "torch":
        save_file({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    else:
        torch.save({"a": torch.zeros(2)}, tmp_path / "model.safetensors")

    (finding,) = [f for f in open_snapshot(str(tmp_path)).checkpoint.findings if f.is_error]

    assert "give it a name that ends in" in finding.remedy


def test_sound_files_are_no_strangers(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)

    assert tell((tmp_path / "a.pt").read_bytes()[:512]) is None
    assert tell(b"") is None


@pytest.mark.parametrize(
    "fixture",
    [
        "hf_llama_bf16_tied_sharded",
        "hf4_gpt2_bin_sharded",
        "dcp_fsdp2_w2",
        "verl_real_fsdp2_w2",
        "hfwriter_sharded_w2",
        "accelerate_save_state",
        "fsdp1_sharded_pickle_w2",
    ],
)
def test_what_copying_leaves_beside_a_checkpoint_changes_nothing(fixture: str, tmp_path: Path) -> None:
    """macOS, rsync, Hadoop, NFS and gsutil each leave files of their own, whose names end as those of the checkpoint do."""
    place = tmp_path / "ckpt"
    shutil.copytree(FIXTURES / "torch" / fixture / "ckpt", place)
    before = open_snapshot(str(place)).checkpoint
    for file in [f for f in place.rglob("*") if f.is_file()]:
        (file.parent / f"._{file.name}").write_bytes(APPLE_DOUBLE)
        (file.parent / f".{file.name}.crc").write_bytes(b"crc\0" + bytes(8))
        (file.parent / f".{file.name}.Xy12Ab").write_bytes(bytes(20))
        (file.parent / f"{file.name}_.gstmp").write_bytes(bytes(20))
    (place / "._model.safetensors").write_bytes(APPLE_DOUBLE)
    (place / ".nfs000000000123").write_bytes(b"")

    after = open_snapshot(str(place)).checkpoint

    assert (after.tensors, after.layout, after.findings) == (before.tensors, before.layout, before.findings)
    assert not any(f.is_error for f in validate(str(place)).findings)


def test_an_index_of_another_save_is_one_finding_that_says_so(tmp_path: Path) -> None:
    """A quantized copy beside the index of the original: mlx-community's Qwen3-VL, CoSER."""
    for number in (1, 2):
        save_file({f"layers.{number}.w": torch.ones(4)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    names = {f"layers.{i}.w": f"model-{i:05d}-of-00013.safetensors" for i in range(1, 14)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    (finding,) = open_snapshot(str(tmp_path)).checkpoint.findings
    assert finding.code == "index-mismatch"
    assert "13 files" in finding.found
    assert "move it away" in finding.remedy

    (tmp_path / "model.safetensors.index.json").unlink()
    assert not any(f.is_error for f in open_snapshot(str(tmp_path)).checkpoint.findings)


def test_placeholders_of_partitioned_parameters_are_told(tmp_path: Path) -> None:
    """PEFT under ZeRO-3 saves lora_A of shape [0], or a file of 40 bytes (peft 2450, trl 4416)."""
    placeholder, nothing = tmp_path / "placeholder", tmp_path / "nothing"
    placeholder.mkdir()
    nothing.mkdir()
    save_file({"l.lora_A.weight": torch.empty(0), "l.lora_B.weight": torch.ones(2, 2)}, placeholder / "adapter_model.safetensors")
    save_file({}, nothing / "adapter_model.safetensors", metadata={"format": "pt"})

    (first,) = open_snapshot(str(placeholder)).checkpoint.findings
    (second,) = open_snapshot(str(nothing)).checkpoint.findings

    assert (first.code, first.where, first.severity) == ("no-data", "l.lora_A.weight", "warning")
    assert (second.code, second.where) == ("no-data", "adapter_model.safetensors")


def test_many_placeholders_are_told_in_a_few_lines(tmp_path: Path) -> None:
    save_file({f"l.{i}.weight": torch.empty(0) for i in range(100)}, tmp_path / "model.safetensors")

    findings = open_snapshot(str(tmp_path)).checkpoint.findings

    assert len(findings) == 9
    assert "100 of shape [0]" in findings[-1].found


@pytest.mark.parametrize(
    "name", ["model.nemo", "model.tar.gz", "model-f16.gguf", "flax_model.msgpack", "model.ckpt-0.data-00000-of-00001"]
)
def test_formats_that_are_not_read_are_refused_by_name_with_what_to_do(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / name, "w"):
        pass

    with pytest.raises(NotRecognisedError) as refused:
        open_snapshot(str(tmp_path))

    assert name in str(refused.value.found)
    assert len(refused.value.hints) == 1


def test_a_zip_archive_of_another_program_is_no_torch_file_that_lacks_records(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", a=np.ones(3), b=np.ones(3))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("checkpoint-3/model.safetensors", b"x")

    for name, seen in (("model.npz", "a.npy"), ("b.zip", "model.safetensors")):
        (finding,) = open_snapshot(str(tmp_path / name)).checkpoint.findings
        assert (finding.code, seen in finding.found) == ("bad-container", True), finding


def test_names_of_checkpoints_are_not_those_of_strangers() -> None:
    names = [
        "model.safetensors",
        "pytorch_model.bin",
        "a.ckpt",
        "__0_0.distcp",
        ".metadata",
        "model.pth.tar",
        "x.pt",
        "config.json",
    ]

    assert [name for name in names if name != "model.pth.tar" and tell_by_name([name])] == []


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_that_does_not_open_is_one_finding_and_not_one_for_each_of_its_tensors(suffix: str, tmp_path: Path) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = {}
    for number in (1, 2):
        tensors = {f"l.{number}.{i}": torch.ones(2) for i in range(20)}
        path = tmp_path / f"{stem}-0000{number}-of-00002.{suffix}"
        save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
        names |= dict.fromkeys(tensors, path.name)
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    path.write_bytes(POINTER)

    assert len(codes(tmp_path)) == 1


def test_a_link_to_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    """A download of the Hugging Face cache whose blob was cleaned away."""
    names = {}
    for number in (1, 2):
        path = tmp_path / f"model-0000{number}-of-00002.safetensors"
        save_file({f"l.{number}": torch.ones(2)}, path)
        names[f"l.{number}"] = path.name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    path.unlink()
    path.symlink_to(tmp_path / "blobs" / "abc")

    (finding,) = [f for f in open_snapshot(str(tmp_path)).checkpoint.findings if f.is_error]

    assert (finding.code, finding.found) == ("special-file", "a link to a file that is not there")
