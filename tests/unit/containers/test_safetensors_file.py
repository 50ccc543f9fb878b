from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.containers import safetensors_file
from ckpttools.containers.safetensors_file import (
    SafetensorsHeader,
    canonical_order,
    parse_header,
    read_header,
    render_header,
    stored_form,
)
from ckpttools.dtypes import BY_NAME, parse_dtype
from ckpttools.model import TensorSpec
from ckpttools.storage.source import LocalSource
from tests import strategies

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def entry(shape: object, begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header_of(table: Mapping[str, object] | bytes, data_bytes: int) -> SafetensorsHeader:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return parse_header(text, "m.safetensors", 0, 8 + len(text) + data_bytes)


def codes(header: SafetensorsHeader) -> list[str]:
    return [f.code for f in header.findings]


def test_entries_are_placed_from_the_start_of_the_file() -> None:
    header = header_of({"a": F32, "b": entry([], 8, 12)}, 12)
    assert [(e.name, str(e.dtype), e.shape, e.offset - header.header_bytes, e.length) for e in header.entries] == [
        ("a", "float32", (2,), 0, 8),
        ("b", "float32", (), 8, 4),
    ]
    assert header.findings == ()


def test_a_blob_inside_a_file_is_placed_in_the_file(tmp_path: Path) -> None:
    blob = safetensors.torch.save({"w": torch.arange(3.0)}, metadata={"k": "v"})
    (tmp_path / "f").write_bytes(b"x" * 7 + blob + b"tail")
    header = read_header(LocalSource(str(tmp_path)), "f", 7, len(blob))
    (w,) = header.entries
    assert (tmp_path / "f").read_bytes()[w.offset : w.offset + w.length] == blob[-12:]
    assert (header.metadata, header.findings) == ({"k": "v"}, ())


def test_a_local_header_is_read_without_a_byte_of_a_tensor(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(safetensors.torch.save({"w": torch.zeros(1000)}))
    reads: list[tuple[int, int]] = []

    class Watched(LocalSource):
        def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
            reads.append((offset, offset + len(buffer)))
            super().read_into(file, offset, buffer)

    header = read_header(Watched(str(tmp_path)), "f", 0, (tmp_path / "f").stat().st_size)
    assert max(stop for _, stop in reads) == header.header_bytes


HOSTILE: dict[str, tuple[Mapping[str, object] | bytes, int, list[str]]] = {
    "an empty header": ({}, 0, []),
    "an empty header with data": ({}, 4, ["trailing-bytes"]),
    "leading space": (b' {"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8, ["bad-header"]),
    "an array": (b"[1]", 0, ["bad-header"]),
    "padding with NUL": (b"{}\0\0", 0, ["bad-header"]),
    "padding with spaces": (b"{}      ", 0, []),
    "no JSON": (b"{nope", 0, ["bad-header"]),
    "no UTF-8": (b'{"\xff":1}', 0, ["bad-header"]),
    "depth bomb": (b'{"a":' + b"[" * 100_000, 0, ["bad-header"]),
    "NaN": (b'{"a":NaN}', 0, ["bad-header"]),
    "lone surrogate": (b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8, ["bad-header"]),
    "repeated tensor, same place": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        8,
        ["duplicate-name"],
    ),
    "repeated field": (b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8, ["bad-header"]),
    "repeated metadata": (b'{"__metadata__":{},"__metadata__":{}}', 0, ["bad-header"]),
    "metadata null": ({"__metadata__": None}, 0, []),
    "metadata a number": ({"__metadata__": 3}, 0, ["bad-header"]),
    "metadata with a list": ({"__metadata__": {"a": []}}, 0, ["bad-header"]),
    "tensor is no object": ({"a": 3}, 0, ["bad-header"]),
    "unknown dtype": ({"a": entry([2], 0, 8, "F33")}, 8, ["unknown-dtype"]),
    "lower case dtype": ({"a": entry([2], 0, 8, "f32")}, 8, ["unknown-dtype"]),
    "dtype a list": ({"a": entry([2], 0, 8, ["F32"])}, 8, ["bad-header"]),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, ["bad-header"]),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, ["bad-header"]),
    "no place": ({"a": {"dtype": "F32", "shape": [2]}}, 8, ["bad-header"]),
    "an extra field": ({"a": {**F32, "note": [1]}}, 8, []),
    "shape negative": ({"a": entry([-2], 0, 8)}, 8, ["bad-header"]),
    "shape a float": ({"a": entry([2.0], 0, 8)}, 8, ["bad-header"]),
    "shape a bool": ({"a": entry([True, 2], 0, 8)}, 8, ["bad-header"]),
    "shape 2^63": ({"a": entry([2**63, 0], 0, 0)}, 0, ["bad-header"]),
    "shape that overflows before its zero": ({"a": entry([2**62, 2**62, 0], 0, 0)}, 0, ["bad-header"]),
    "shape that overflows after its zero": ({"a": entry([0, 2**62, 2**62], 0, 0)}, 0, ["bad-header"]),
    "rank 65": ({"a": entry([1] * 65, 0, 4)}, 4, ["bad-header"]),
    "rank 64": ({"a": entry([1] * 64, 0, 4)}, 4, []),
    "place reversed": ({"a": entry([2], 8, 0)}, 8, ["bad-header"]),
    "place negative": ({"a": entry([2], -8, 0)}, 8, ["bad-header"]),
    "place a float": ({"a": entry([2], 0, 8.0)}, 8, ["bad-header"]),
    "place of three": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, 8, ["bad-header"]),
    "place of 2^64": ({"a": entry([2], 0, 2**64)}, 8, ["bad-header"]),
    "too few bytes for the shape": ({"a": entry([2], 0, 4)}, 4, ["bad-header"]),
    "half a byte": ({"a": entry([3], 0, 2, "F4")}, 2, ["bad-header"]),
    "overlap": ({"a": F32, "b": entry([2], 4, 12)}, 12, ["extent-overlap"]),
    "the same place twice": ({"a": F32, "b": F32}, 8, ["extent-overlap"]),
    "an empty tensor inside another": ({"a": F32, "b": entry([0], 4, 4)}, 8, ["extent-overlap"]),
    "empty tensors between others": ({"a": F32, "b": entry([0], 8, 8), "c": entry([0], 0, 0), "d": entry([1], 8, 12)}, 12, []),
    "gap": ({"a": F32, "b": entry([2], 12, 20)}, 20, ["extent-gap"]),
    "gap at the start": ({"a": entry([2], 4, 12)}, 12, ["extent-gap"]),
    "bytes after the end": ({"a": F32}, 9, ["trailing-bytes"]),
    "cut short": ({"a": F32, "b": entry([2], 8, 16)}, 15, ["file-too-short"]),
    "no data at all": ({"a": F32}, 0, ["file-too-short"]),
    "name with NUL": ({"a\0": F32}, 8, ["bad-header"]),
    "name of 70,000 characters": ({"a" * 70_000: F32}, 8, ["bad-header"]),
    "several at once": (
        {"a": entry([2], 0, 8, "X"), "b": entry([-1], 8, 16), "c": entry([2], 20, 28), "d": 1},
        28,
        ["unknown-dtype", "bad-header", "bad-header"],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_give_the_finding_that_says_what_is_wrong(name: str) -> None:
    table, data_bytes, expected = HOSTILE[name]
    header = header_of(table, data_bytes)
    assert codes(header) == expected
    assert all("m.safetensors" in f.where and f.expected and f.found for f in header.findings)


@pytest.mark.parametrize("name", [n for n, (_, _, expected) in HOSTILE.items() if not expected])
def test_what_is_sound_for_us_is_sound_for_the_official_parser(name: str) -> None:
    table, data_bytes, _ = HOSTILE[name]
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    safetensors.deserialize(len(text).to_bytes(8, "little") + text + bytes(data_bytes))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty-file"),
        (b"\2\0\0", "file-too-short"),
        (b"\0" * 8, "bad-header"),
        (b"\1\0\0\0\0\0\0\0{", "bad-header"),
        ((2**60).to_bytes(8, "little") + b"{}", "bad-header"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "bad-header"),
        (b"\3\0\0\0\0\0\0\0{}", "bad-header"),
    ],
)
def test_a_length_field_that_cannot_be_true(tmp_path: Path, data: bytes, code: str) -> None:
    (tmp_path / "f").write_bytes(data)
    assert codes(read_header(LocalSource(str(tmp_path)), "f", 0, len(data))) == [code]


def test_a_header_above_the_official_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as f:
        f.write((100_000_001).to_bytes(8, "little"))
        f.truncate(100_000_100)  # sparse
    assert codes(read_header(LocalSource(str(tmp_path)), "f", 0, 100_000_100)) == ["bad-header"]


def test_findings_say_the_byte_expected_and_found() -> None:
    header = header_of({"a": F32, "b": entry([2], 4, 12)}, 12)
    start = header.header_bytes
    (finding,) = header.findings
    assert finding.where == f"b in m.safetensors at byte {start + 4}"
    assert finding.expected == f"data from byte {start + 8} on, where `a` ends"
    assert finding.found == f"data from byte {start + 4} on"


def test_a_cut_file_is_one_finding_with_both_lengths() -> None:
    header = header_of({"a": F32, "b": entry([2], 8, 16), "c": entry([2], 16, 24)}, 10)
    (finding,) = header.findings
    assert f"{header.header_bytes + 24} bytes" in finding.expected
    assert f"{header.header_bytes + 10} bytes" in finding.found
    assert "`b` and 1 more" in finding.found
    assert [e.is_readable for e in header.entries] == [True, False, False]


def test_an_ambiguous_or_ill_sized_tensor_is_not_readable() -> None:
    header = header_of(
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"I8","shape":[8],"data_offsets":[0,8]}}', 8
    )
    assert [e.is_readable for e in header.entries] == [False]
    assert [e.is_readable for e in header_of({"a": entry([3], 0, 8)}, 8).entries] == [False]


def test_a_thoroughly_broken_header_does_not_give_a_finding_per_tensor() -> None:
    header = header_of({f"t{i}": entry([2], 0, 8, "X") for i in range(5000)}, 8)
    assert len(header.findings) == 101
    assert "not listed" in header.findings[-1].found


@pytest.mark.parametrize(
    ("code", "shape", "length", "dtype", "seen"),
    [
        ("F4", [3, 8], 12, "float4_e2m1fn_x2", (3, 4)),
        ("F4", [2, 3], 3, "float4_e2m1fn", (2, 3)),
        ("F4", [0], 0, "float4_e2m1fn_x2", (0,)),
        ("F6_E3M2", [4], 3, "float6_e3m2fn", (4,)),
        ("F8_E8M0", [4], 4, "float8_e8m0fnu", (4,)),
        ("C64", [2], 16, "complex64", (2,)),
    ],
)
def test_dtypes_are_named_and_counted_as_torch_does(
    code: str, shape: list[int], length: int, dtype: str, seen: tuple[int, ...]
) -> None:
    header = header_of({"a": entry(shape, 0, length, code)}, length)
    (a,) = header.entries
    assert (str(a.dtype), a.shape, a.length, a.is_readable, header.findings) == (dtype, seen, length, True, ())
    spec = TensorSpec("a", a.dtype, a.shape)
    assert stored_form(spec) == (code, tuple(shape))
    assert spec.length_bytes == length


@pytest.mark.parametrize("dtype", ["complex128", "complex32", "qint8", "quint4x2", "bits8", "uint3", "int4"])
def test_dtypes_without_a_place_in_the_format(dtype: str) -> None:
    assert stored_form(TensorSpec("a", BY_NAME[dtype], (4,))) is None
    with pytest.raises(ValueError, match=dtype):
        canonical_order([TensorSpec("a", BY_NAME[dtype], (4,))])


def test_4_bit_floats_of_rank_0_have_no_pairs_to_store() -> None:
    assert stored_form(TensorSpec("a", BY_NAME["float4_e2m1fn_x2"], ())) is None
    assert stored_form(TensorSpec("a", BY_NAME["float4_e2m1fn"], (3,))) is None


TORCH_DTYPES = [d for d in BY_NAME.values() if d.safetensors and hasattr(torch, d.name)]


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(TORCH_DTYPES), strategies.shapes(min_rank=1)),
        max_size=8,
    ),
    st.sampled_from([{}, {"format": "pt"}, {"größe": 'a"\\\n\x7f'}]),
)
def test_our_header_has_the_bytes_of_the_official_writer(
    tensors: dict[str, tuple[object, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    real = {
        s.name: torch.zeros(s.length_bytes, dtype=torch.uint8).view(getattr(torch, s.dtype.name)).reshape(s.shape) for s in specs
    }
    official = safetensors.torch.save(real, metadata=metadata or None)
    header = render_header(specs, metadata)
    assert official[: len(header)] == header
    assert len(official) == len(header) + sum(s.length_bytes for s in specs)


def test_metadata_is_sorted_and_does_not_depend_on_the_order_of_anything() -> None:
    specs = [TensorSpec(n, parse_dtype(d), (2,)) for n, d in (("b", "int8"), ("a", "float32"), ("c", "int64"))]
    one = render_header(specs, {"b": "2", "a": "1"})
    assert one == render_header(specs[::-1], {"a": "1", "b": "2"})
    assert one[8:40] == b'{"__metadata__":{"a":"1","b":"2"'
    assert (len(one) % 8, int.from_bytes(one[:8], "little")) == (0, len(one) - 8)


def test_every_code_of_the_table_has_its_place_in_the_writers_order() -> None:
    stored = {d.safetensors for d in BY_NAME.values() if d.safetensors}
    assert stored == set(safetensors_file._WRITER_ORDER)


def specs_of(header: SafetensorsHeader) -> Sequence[TensorSpec]:
    return [TensorSpec(e.name, e.dtype, e.shape) for e in header.entries]


def test_what_is_rendered_is_read_back() -> None:
    specs = canonical_order(
        TensorSpec(f"t{i}", d, (3, 4)) for i, d in enumerate(BY_NAME.values()) if stored_form(TensorSpec("", d, (3, 4)))
    )
    data = render_header(specs, {"format": "pt"})
    header = parse_header(data[8:], "f", 0, len(data) + sum(s.length_bytes for s in specs))
    assert (specs_of(header), header.findings) == (specs, ())
