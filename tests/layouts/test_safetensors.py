from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.containers.safetensors_file import stored_form
from ckpttools.dtypes import BY_NAME, TABLE, parse_dtype
from ckpttools.errors import ConversionError
from ckpttools.layouts.base import Contents, Part
from ckpttools.layouts.safetensors import LAYOUT, arrange
from ckpttools.model import ArrangedFile, Arrangement, TensorSpec
from ckpttools.storage.source import LocalSource, Source, open_source, read
from tests import strategies
from tests.fixture_cases import Case, Expected

SOUND = (
    "accelerate_save_state",
    "hf4_llama_safetensors_sharded",
    "hf_gpt2_tied_single",
    "hf_llama_bf16_tied_sharded",
    "hf_mixtral_fp32_sharded",
    "hf_t5_variant",
    "hf_trainer_run",
    "hfwriter_rank0_3files",
    "safetensors_all_dtypes",
)
DAMAGED = {
    "dmg_index_key_dropped": ["not-in-index"],
    "dmg_index_missing_file": ["missing-file", "index-mismatch"],
    "dmg_index_path_traversal": ["reference-outside"],
    "dmg_st_header_len_huge": ["bad-header"],
    "dmg_st_out_of_range": ["extent-gap", "file-too-short"],
    "dmg_st_overlap": ["extent-overlap", "extent-gap"],
    "dmg_st_swapped_offsets": [],
    "dmg_st_truncated": ["file-too-short"],
}


def sniff(location: Path) -> tuple[Source, list[Part]]:
    source, _ = open_source(str(location))
    listing = source.listing()
    return source, LAYOUT.sniff(listing, lambda p: read(source, p, 0, min(64, listing.length_bytes(p))))


def read_model(location: Path) -> tuple[Source, Contents]:
    source, parts = sniff(location)
    (part,) = [p for p in parts if p.family == "model"]
    return source, LAYOUT.read(source, source.listing(), part)


def lines_of(source: Source, contents: Contents) -> list[dict[str, object]]:
    lines = []
    for tensor in contents.tensors:
        (piece,) = tensor.pieces
        data = read(source, piece.extent.file, piece.extent.offset, piece.extent.length)
        lines.append(
            {
                "name": tensor.name,
                "dtype": str(tensor.spec.dtype),
                "shape": list(tensor.spec.shape),
                "digest": hashlib.sha256(data).hexdigest(),
            }
        )
    return lines


def codes(contents: Contents) -> list[str]:
    return [f.code for f in contents.findings]


def save(path: Path, *names: str, value: float = 1.0) -> None:
    safetensors.torch.save_file({n: torch.full((2,), value) for n in names}, path, metadata={"format": "pt"})


def write_index(path: Path, weight_map: Mapping[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 8 * len(weight_map)}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", SOUND)
def test_every_tensor_is_where_the_header_says(name: str) -> None:
    case = Case("torch", name)
    for target in case.targets():
        source, contents = read_model(target.path)
        model = {n: e for n, e in target.tensors.items() if not n.startswith("optimizer.")}
        assert case.missing(model, lines_of(source, contents)) == []
        assert codes(contents) == []
        assert contents.commit.is_committed
        assert {t.path for t in contents.tensors} == {(t.name,) for t in contents.tensors}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_found_and_what_is_readable_is_what_it_was(name: str) -> None:
    case = Case("torch", name)
    source, contents = read_model(case.checkpoint)
    assert codes(contents) == DAMAGED[name]
    shown = " ".join(f"{f.where} {f.expected} {f.found}" for f in contents.findings)
    assert [m for m in case.must_mention if m not in shown] == []
    touched = {case.truth.get("tensor"), *case.truth.get("tensors_swapped", ())}
    for tensor in contents.tensors:
        if tensor.pieces and tensor.name not in touched:
            piece = tensor.pieces[0]
            data = read(source, piece.extent.file, piece.extent.offset, piece.extent.length)
            expected: Expected = case.undamaged_tensors[tensor.name]
            assert hashlib.sha256(data).hexdigest() in expected.digests


def test_a_tensor_beyond_the_end_is_known_and_has_no_piece() -> None:
    _, contents = read_model(Case("torch", "dmg_st_truncated").checkpoint)
    assert sum(not t.pieces for t in contents.tensors) == 7
    assert len(contents.tensors) == 28


def test_shards_without_an_index_are_read_with_a_warning(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("torch/hf_llama_bf16_tied_sharded/ckpt")
    (path / "model.safetensors.index.json").unlink()
    _, contents = read_model(path)
    assert [(f.code, f.severity, f.where) for f in contents.findings] == [
        ("missing-index", "warning", "model.safetensors.index.json")
    ]
    assert contents.commit.is_committed
    assert len(contents.tensors) == 20


@pytest.mark.parametrize("has_index", [True, False])
def test_a_missing_shard_is_named(copy_of: Callable[[str], Path], has_index: bool) -> None:
    path = copy_of("torch/hf_llama_bf16_tied_sharded/ckpt")
    (path / "model-00002-of-00002.safetensors").unlink()
    if not has_index:
        (path / "model.safetensors.index.json").unlink()
    _, contents = read_model(path)
    assert [(f.code, f.where) for f in contents.findings] == [("missing-file", "model-00002-of-00002.safetensors")]
    assert (contents.commit.is_committed, contents.commit.record) == (False, "model-00002-of-00002.safetensors")


def test_an_index_without_any_of_its_files(tmp_path: Path) -> None:
    write_index(tmp_path / "model.safetensors.index.json", {"a": "model-00001-of-00001.safetensors"})
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["missing-file"]


@pytest.mark.parametrize(("text", "code"), [("", "empty-file"), ('{"weight_map": {', "bad-json")])
def test_a_torn_index_is_no_commit_and_the_shards_are_read(copy_of: Callable[[str], Path], text: str, code: str) -> None:
    path = copy_of("torch/hf_llama_bf16_tied_sharded/ckpt")
    (path / "model.safetensors.index.json").write_text(text)
    _, contents = read_model(path)
    assert codes(contents) == [code]
    assert (contents.commit.is_committed, len(contents.tensors)) == (False, 20)


def test_stale_shards_beside_an_index_are_not_read(copy_of: Callable[[str], Path]) -> None:
    path = copy_of("torch/hf_llama_bf16_tied_sharded/ckpt")
    save(path / "model-00001-of-00007.safetensors", "old")
    _, contents = read_model(path)
    assert [(f.code, f.where) for f in contents.findings] == [("unreferenced-file", "model-00001-of-00007.safetensors")]
    assert {f.path: f.role for f in contents.files}["model-00001-of-00007.safetensors"] == "unreferenced"
    assert "old" not in {t.name for t in contents.tensors}


def test_the_complete_set_is_the_model_and_the_rest_is_stale(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00002.safetensors", "a")
    save(tmp_path / "model-00002-of-00002.safetensors", "b")
    save(tmp_path / "model-00002-of-00003.safetensors", "a")
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["unreferenced-file", "missing-index"]
    assert [t.name for t in contents.tensors] == ["a", "b"]


def test_two_incomplete_sets_say_all_that_is_missing(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00002.safetensors", "a")
    save(tmp_path / "model-00002-of-00003.safetensors", "b")
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["missing-file"] * 3


def test_a_lone_file_beside_an_index_that_does_not_name_it_is_a_second_model(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00001.safetensors", "a")
    save(tmp_path / "model.safetensors", "a", value=2)
    write_index(tmp_path / "model.safetensors.index.json", {"a": "model-00001-of-00001.safetensors"})
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["unreferenced-file", "duplicate-weights"]


def test_an_index_over_a_lone_file(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", "a")
    write_index(tmp_path / "model.safetensors.index.json", {"a": "model.safetensors"})
    _, contents = read_model(tmp_path)
    assert (codes(contents), [t.name for t in contents.tensors]) == ([], ["a"])


def test_an_index_may_name_any_file(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00001.safetensors", "a")
    save(tmp_path / "mtp.safetensors", "b")
    (tmp_path / "extra").mkdir()
    save(tmp_path / "extra" / "x.safetensors", "c")
    names = {"a": "model-00001-of-00001.safetensors", "b": "mtp.safetensors", "c": "extra/x.safetensors"}
    write_index(tmp_path / "model.safetensors.index.json", names)
    source, parts = sniff(tmp_path)
    contents = LAYOUT.read(source, source.listing(), parts[0])
    assert (len(parts), codes(contents), [t.name for t in contents.tensors]) == (1, [], ["a", "b", "c"])


def test_a_variant_that_is_alone_is_the_model() -> None:
    _, parts = sniff(Case("torch", "hf_t5_variant").checkpoint)
    assert [(p.family, p.manifest) for p in parts] == [("model", "model.safetensors.index.fp32.json")]


def test_a_variant_beside_the_plain_set_is_a_family_of_its_own(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", "a")
    save(tmp_path / "model.fp16.safetensors", "a")
    source, parts = sniff(tmp_path)
    assert [(p.family, p.files) for p in parts] == [
        ("model", ("model.safetensors",)),
        ("model.fp16", ("model.fp16.safetensors",)),
    ]
    assert [codes(LAYOUT.read(source, source.listing(), p)) for p in parts] == [[], ["duplicate-weights"]]


@pytest.mark.parametrize(
    ("files", "families"),
    [
        (["adapter_model"], {"model": ["adapter_model"]}),
        (["adapter_model", "model"], {"model": ["model"], "adapter_model": ["adapter_model"]}),
        (["model", "model_1"], {"model": ["model"], "model_1": ["model_1"]}),
        (["model", "optimizer"], {"model": ["model"], "optimizer": ["optimizer"]}),
        (["optimizer"], {"model": ["optimizer"]}),
        (["ema", "model"], {"model": ["model"], "ema": ["ema"]}),
        (["anything"], {"model": ["anything"]}),
        (["layers-0", "layers-1", "optimizer"], {"model": ["layers-0", "layers-1"], "optimizer": ["optimizer"]}),
        (["consolidated", "model"], {"model": ["model"], "consolidated": ["consolidated"]}),
        (
            ["diffusion_pytorch_model", "diffusion_pytorch_model.fp16"],
            {"model": ["diffusion_pytorch_model"], "model.fp16": ["diffusion_pytorch_model.fp16"]},
        ),
        (["model.fp16", "model.fp32"], {"model.fp16": ["model.fp16"], "model.fp32": ["model.fp32"]}),
    ],
)
def test_which_file_is_the_model(tmp_path: Path, files: list[str], families: dict[str, list[str]]) -> None:
    for name in files:
        save(tmp_path / f"{name}.safetensors", "a")
    _, parts = sniff(tmp_path)
    assert {p.family: [f.removesuffix(".safetensors") for f in p.files] for p in parts} == families


def test_per_layer_files_are_one_model_whose_completeness_nothing_proves(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / f"layers-{i}.safetensors", f"layers.{i}.w")
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["completeness-unproved"]
    assert len(contents.tensors) == 3


def test_one_name_in_two_files_is_a_finding(tmp_path: Path) -> None:
    save(tmp_path / "model-rank-0-part-0.safetensors", "w")
    save(tmp_path / "model-rank-1-part-0.safetensors", "w")
    _, contents = read_model(tmp_path)
    assert "duplicate-name" in codes(contents)
    assert len(contents.tensors) == 1


def test_with_an_index_a_tensor_comes_from_the_file_that_it_names(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00002.safetensors", "a", "b")
    save(tmp_path / "model-00002-of-00002.safetensors", "a")
    write_index(
        tmp_path / "model.safetensors.index.json",
        {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    )
    _, contents = read_model(tmp_path)
    assert "duplicate-name" in codes(contents)
    assert {t.name: t.pieces[0].extent.file for t in contents.tensors}["a"] == "model-00002-of-00002.safetensors"


def test_a_single_file_of_any_name_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    save(tmp_path / "weights.st", "a")
    (tmp_path / "other").write_bytes(b"not one")
    _, parts = sniff(tmp_path / "weights.st")
    assert [p.files for p in parts] == [("weights.st",)]
    assert sniff(tmp_path / "other")[1] == []
    assert sniff(tmp_path)[1] == []


def test_subdirectories_are_not_the_snapshot(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    save(tmp_path / "unet" / "model.safetensors", "a")
    assert sniff(tmp_path)[1] == []


def test_a_link_that_leads_nowhere_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    _, contents = read_model(tmp_path)
    assert codes(contents) == ["special-file"]


def test_the_rank_0_mode_of_dcp_says_who_wrote_it() -> None:
    _, contents = read_model(Case("torch", "hfwriter_rank0_3files").checkpoint)
    assert contents.written_by == "DCP HuggingFaceStorageWriter 1.0"


# -- writing


def write(arrangement: Arrangement, directory: Path) -> None:
    """The files by hand: literals as they are, slots as a pattern that depends on the tensor."""
    for file in arrangement.files:
        content = bytearray(file.length_bytes)
        covered = 0
        for offset, data in [(x.offset, x.data) for x in file.literals] + [
            (s.offset, pattern(s.tensor, s.length)) for s in file.slots
        ]:
            content[offset : offset + len(data)] = data
            covered += len(data)
        assert covered == len(content) == file.length_bytes
        (directory / file.path).write_bytes(content)


def pattern(name: str, length: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(length)


STORABLE = [d for d in TABLE if d.safetensors]
SPECS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6).filter(lambda n: n != "__metadata__"),
    st.tuples(st.sampled_from(STORABLE), strategies.shapes()),
    max_size=9,
).map(lambda d: [s for s in (TensorSpec(n, t, shape) for n, (t, shape) in d.items()) if stored_form(s)])


@settings(max_examples=60)
@given(SPECS, st.none() | st.integers(1, 300))
def test_what_is_arranged_is_read_back_and_the_official_parser_takes_it(
    tmp_path_factory: pytest.TempPathFactory, specs: list[TensorSpec], limit: int | None
) -> None:
    directory = tmp_path_factory.mktemp("out")
    arrangement = arrange(specs, max_shard_bytes=limit, metadata={"k": "v"})
    write(arrangement, directory)
    source, contents = read_model(directory)
    assert codes(contents) == []
    assert {t.spec for t in contents.tensors} == set(specs)
    for tensor in contents.tensors:
        (piece,) = tensor.pieces
        assert read(source, piece.extent.file, piece.extent.offset, piece.extent.length) == pattern(
            tensor.name, piece.extent.length
        )
    for file in arrangement.files:
        if file.slots:
            parsed = safetensors.deserialize((directory / file.path).read_bytes())
            assert {n: bytes(p["data"]) for n, p in parsed} == {s.tensor: pattern(s.tensor, s.length) for s in file.slots}


def shard_names(arrangement: Arrangement) -> list[list[str]]:
    return [sorted(s.tensor for s in f.slots) for f in arrangement.files if f.slots]


def f32(name: str, elements: int) -> TensorSpec:
    return TensorSpec(name, parse_dtype("float32"), (elements,))


def test_shards_are_filled_in_the_given_order_and_a_large_tensor_is_alone() -> None:
    specs = [f32("a", 3), f32("b", 3), f32("large", 100), f32("c", 1), f32("d", 5)]
    assert shard_names(arrange(specs, max_shard_bytes=24, metadata={})) == [["large"], ["a", "b"], ["c", "d"]]


def test_the_split_is_that_of_huggingface_hub() -> None:
    hub = pytest.importorskip("huggingface_hub")
    sizes = [3, 3, 100, 1, 5, 0, 6, 7, 2, 4, 1, 1]
    split = hub.split_torch_state_dict_into_shards({f"t{i}": torch.zeros(n) for i, n in enumerate(sizes)}, max_shard_size=24)
    arrangement = arrange([f32(f"t{i}", n) for i, n in enumerate(sizes)], max_shard_bytes=24, metadata={})
    assert {f.path: {s.tensor for s in f.slots} for f in arrangement.files if f.slots} == {
        k: set(v) for k, v in split.filename_to_tensors.items()
    }


def test_one_shard_is_one_file_that_is_its_own_record() -> None:
    (file,) = arrange([f32("a", 2)], max_shard_bytes=8, metadata={}, single_file_name="x.safetensors").files
    assert (file.path, file.is_commit_record) == ("x.safetensors", True)


def test_the_index_is_last_and_makes_the_set_readable() -> None:
    files = arrange([f32("b", 2), f32("a", 2)], max_shard_bytes=8, metadata={}).files
    assert [(f.path, f.is_commit_record) for f in files] == [
        ("model-00001-of-00002.safetensors", False),
        ("model-00002-of-00002.safetensors", False),
        ("model.safetensors.index.json", True),
    ]
    assert json.loads(files[-1].literals[0].data) == {
        "metadata": {"total_size": 16},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    }


def test_no_tensors_at_all_is_an_empty_file_that_says_its_format(tmp_path: Path) -> None:
    arrangement = arrange([], max_shard_bytes=None, metadata={})
    write(arrangement, tmp_path)
    assert safetensors.safe_open(tmp_path / "model.safetensors", "pt").metadata() == {"format": "pt"}


def test_data_begins_at_a_multiple_of_8() -> None:
    def start(file: ArrangedFile) -> int:
        return len(file.literals[0].data)

    assert {start(arrange([f32("x" * n, 1)], metadata={}).files[0]) % 8 for n in range(9)} == {0}


@pytest.mark.parametrize("dtype", ["complex128", "complex32", "qint8", "bits4x2", "uint4"])
def test_dtypes_that_safetensors_lacks_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(ConversionError, match=rf"`bad` \({dtype} \[2\]\)"):
        arrange([f32("a", 1), TensorSpec("bad", BY_NAME[dtype], (2,))], metadata={})


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"], ["a\0b"], ["\ud800"]])
def test_names_that_safetensors_cannot_hold_are_refused(names: list[str]) -> None:
    with pytest.raises(ConversionError):
        arrange([f32(n, 1) for n in names], metadata={})


def test_a_header_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttools.layouts.safetensors.MAX_HEADER_BYTES", 500)
    with pytest.raises(ConversionError, match="too many tensors"):
        arrange([f32(str(i), 1) for i in range(20)], metadata={})


def test_a_local_source_is_enough(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", "a")
    source = LocalSource(str(tmp_path))
    contents = LAYOUT.read(source, source.listing(), Part("safetensors", "optimizer", ("model.safetensors",)))
    assert {t.family for t in contents.tensors} == {f.family for f in contents.files} == {"optimizer"}
