from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.containers.shard_index import (
    RankShard,
    ShardIndex,
    check_index,
    check_numbers,
    check_references,
    is_plain_reference,
    missing_numbers,
    parse_index,
    parse_index_name,
    parse_rank_shard,
    parse_shard_name,
    read_index,
    render_index,
    shard_sets,
)
from ckpttools.findings import Finding
from ckpttools.storage.source import ListedFile, Listing, LocalSource


def codes(findings: list[Finding] | tuple[Finding, ...]) -> list[str]:
    return [f.code for f in findings]


def listing(*paths: str) -> Listing:
    return Listing([ListedFile(p, 1) for p in paths])


def index_of(weight_map: dict[str, str], total_size: float | None = None) -> ShardIndex:
    metadata = {} if total_size is None else {"total_size": total_size}
    return parse_index(json.dumps({"metadata": metadata, "weight_map": weight_map}).encode(), "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("path", "stem", "variant", "number", "count"),
    [
        ("model.safetensors", "model", "", None, None),
        ("model.fp16.safetensors", "model", "fp16", None, None),
        ("adapter_model.safetensors", "adapter_model", "", None, None),
        ("model_1.safetensors", "model_1", "", None, None),
        ("model-00001-of-00003.safetensors", "model", "", 1, 3),
        ("model_00001-of-00072.safetensors", "model", "", 1, 72),
        ("model.fp32-00001-of-00003.safetensors", "model", "fp32", 1, 3),
        ("diffusion_pytorch_model-00002-of-00003.safetensors", "diffusion_pytorch_model", "", 2, 3),
        ("diffusion_pytorch_model-00001-of-00002.fp16.safetensors", "diffusion_pytorch_model", "fp16", 1, 2),
        ("sub/model-00001-of-00003.safetensors", "model", "", 1, 3),
        ("layers-22.safetensors", "layers-22", "", None, None),
        ("layers.22.safetensors", "layers.22", "", None, None),
        ("model-rank-0-part-0.safetensors", "model-rank-0-part-0", "", None, None),
    ],
)
def test_file_names_of_the_field(path: str, stem: str, variant: str, number: int | None, count: int | None) -> None:
    name = parse_shard_name(path)
    assert name is not None
    assert (name.stem, name.variant, name.number, name.count) == (stem, variant, number, count)
    if number is not None:
        assert name.sibling(number) == path


@pytest.mark.parametrize("path", ["pytorch_model_00001-of-00072.bin", "pytorch_model-00001-of-00072.bin"])
def test_bin_shards_with_either_separator(path: str) -> None:
    name = parse_shard_name(path, ".bin")
    assert name is not None
    assert (name.stem, name.sibling(72)) == ("pytorch_model", path.replace("00001", "00072"))


@pytest.mark.parametrize("path", ["model.bin", ".safetensors", "model.safetensors.index.json", "model"])
def test_names_of_other_files(path: str) -> None:
    assert parse_shard_name(path) is None


@pytest.mark.parametrize(
    ("path", "suffix", "expected"),
    [
        ("model.safetensors.index.json", ".safetensors", ("model", "")),
        ("model.safetensors.index.fp32.json", ".safetensors", ("model", "fp32")),
        ("diffusion_pytorch_model.fp16.safetensors.index.json", ".safetensors", ("diffusion_pytorch_model", "fp16")),
        ("pytorch_model.bin.index.json", ".bin", ("pytorch_model", "")),
        ("pytorch_model.bin.index.json", ".safetensors", None),
        ("config.json", ".safetensors", None),
        ("diffusion_pytorch_model.safetensors.fp16.index.json", ".safetensors", ("diffusion_pytorch_model", "fp16")),
    ],
)
def test_index_names(path: str, suffix: str, expected: tuple[str, str] | None) -> None:
    assert parse_index_name(path, suffix) == expected


def test_rank_shards_count_ranks_from_0() -> None:
    path = "sharded/shard-00002-model-00001-of-00003.safetensors"
    assert parse_rank_shard(path) == RankShard(path, 1, 1, 3)
    assert parse_rank_shard("model-00001-of-00003.safetensors") is None


def test_sets_are_told_apart_by_stem_and_variant() -> None:
    sets = shard_sets(
        [
            "config.json",
            "model.safetensors.index.json",
            "model-00002-of-00002.safetensors",
            "model-00001-of-00002.safetensors",
            "model.fp16.safetensors",
            "shard-00001-model-00001-of-00001.safetensors",
            "optimizer.bin",
        ]
    )
    assert [(s.stem, s.variant, s.index, len(s.files)) for s in sets] == [
        ("model", "", "model.safetensors.index.json", 2),
        ("model", "fp16", "", 1),
    ]
    assert sets[0].paths == (
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )


def test_missing_shards_are_named_as_the_others_are() -> None:
    (shards,) = shard_sets(["pytorch_model_00001-of-00003.bin", "pytorch_model_00003-of-00003.bin"], ".bin")
    (finding,) = check_numbers(shards)
    assert (finding.code, finding.where) == ("missing-file", "pytorch_model_00002-of-00003.bin")


def test_sets_that_count_from_0_are_complete() -> None:
    (shards,) = shard_sets(["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"])
    assert check_numbers(shards) == []


def test_a_count_that_is_a_lie_costs_nothing() -> None:
    (shards,) = shard_sets(["model-00001-of-999999999.safetensors"])
    assert len(check_numbers(shards)) == 21
    assert len(list(islice(missing_numbers(shards.files), 3))) == 3


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "..",
        "../x",
        "a/../../x",
        "/etc/passwd",
        "C:x",
        "c:/x",
        "a\\b",
        "..\\x",
        "a//b",
        "./x",
        "a/",
        "a\0b",
        "gs://b/x",
        "file:///x",
    ],
)
def test_references_that_leave_the_directory(reference: str) -> None:
    assert not is_plain_reference(reference)
    index = index_of({"w": reference})
    assert (index.files, codes(index.findings)) == ((), ["reference-outside"])


@pytest.mark.parametrize("reference", ["model.safetensors", "a/b.safetensors", "..a", "a..b", ".hidden"])
def test_references_downwards(reference: str) -> None:
    assert is_plain_reference(reference)
    assert index_of({"w": reference}).files == (reference,)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "bad-json"),
        (b"[]", "bad-json"),
        (b"{}", "bad-json"),
        (b'{"weight_map": []}', "bad-json"),
        (b'{"weight_map": {"a": "f", "a": "f"}}', "bad-json"),
        (b'{"weight_map": {"a": "f"', "bad-json"),
    ],
)
def test_what_is_no_index(data: bytes, code: str) -> None:
    index = parse_index(data, "i.json")
    assert (index.is_parsed, codes(index.findings)) == (False, [code])


def test_a_reference_that_is_no_text() -> None:
    index = parse_index(b'{"weight_map": {"a": 3, "b": "f"}}', "i.json")
    assert (index.is_parsed, index.files, codes(index.findings)) == (True, ("f",), ["bad-json"])


def test_an_empty_index_file(tmp_path: Path) -> None:
    (tmp_path / "i.json").touch()
    source = LocalSource(str(tmp_path))
    assert codes(read_index(source, source.listing(), "i.json").findings) == ["empty-file"]


def test_files_that_are_not_there_and_files_that_are_not_named() -> None:
    index = index_of({"a": "f1", "b": "f1", "c": "f2"})
    findings = check_references(index, listing("f2", "f3"), ["f2", "f3"])
    assert [(f.code, f.where) for f in findings] == [("missing-file", "f1"), ("unreferenced-file", "f3")]
    assert "`a` and 1 more" in findings[0].expected


def test_an_index_that_is_right_has_no_findings() -> None:
    index = index_of({"a": "f1", "b": "f2"}, 12)
    assert check_index(index, {"f1": ["a"], "f2": ["b"]}, total_bytes=[12]) == []


def test_a_tensor_that_is_elsewhere_or_nowhere() -> None:
    findings = check_index(index_of({"a": "f1", "b": "f2"}), {"f1": ["b"], "f2": []})
    assert [(f.code, f.found) for f in findings] == [("index-mismatch", "in none of the files"), ("index-mismatch", "in f1")]


def test_a_file_that_was_not_read_is_not_judged() -> None:
    assert check_index(index_of({"a": "gone"}), {}) == []


def test_a_tensor_that_the_index_does_not_list() -> None:
    (finding,) = check_index(index_of({"a": "f1"}), {"f1": ["a", "b"]})
    assert (finding.code, finding.where) == ("not-in-index", "b in f1")


def test_a_tensor_in_two_files() -> None:
    assert "duplicate-name" in codes(check_index(index_of({"a": "f1", "b": "f2"}), {"f1": ["a"], "f2": ["a", "b"]}))


@pytest.mark.parametrize(("stated", "severity"), [(13, "warning"), (13.0, "warning"), (12.125, "note")])
def test_a_total_that_does_not_add_up(stated: float, severity: str) -> None:
    (finding,) = check_index(index_of({"a": "f1"}, stated), {"f1": ["a"]}, total_bytes=[12])
    assert (finding.code, finding.severity) == ("total-size-mismatch", severity)


def test_tied_tensors_may_be_counted_once_or_each() -> None:
    for stated in (12, 24, 24.0):
        assert check_index(index_of({"a": "f1"}, stated), {"f1": ["a"]}, total_bytes=[12, 24]) == []


@given(st.dictionaries(st.text(max_size=5), st.sampled_from(["f1", "d/f2"]), max_size=5), st.integers(0, 2**60))
def test_what_is_rendered_is_parsed(weight_map: dict[str, str], total: int) -> None:
    data = render_index(weight_map, total)
    index = parse_index(data, "i.json")
    assert (index.weight_map, index.total_size, index.findings) == (weight_map, total, ())
    assert data.endswith(b"}\n")


def test_references_are_relative_to_the_index() -> None:
    assert parse_index(render_index({"a": "f"}, 1), "sub/i.json").files == ("sub/f",)


def test_rendered_as_hugging_face_does() -> None:
    assert render_index({"b": "f2", "a": "f1"}, 5) == (
        b'{\n  "metadata": {\n    "total_size": 5\n  },\n  "weight_map": {\n    "a": "f1",\n    "b": "f2"\n  }\n}\n'
    )
