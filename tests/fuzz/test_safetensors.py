"""Whatever the bytes are, reading gives contents and findings; and what we call sound the official parser takes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import safetensors
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttools.containers.safetensors_file import read_header
from ckpttools.errors import StorageError
from ckpttools.layouts import dcp_hf
from ckpttools.layouts import safetensors as plain
from ckpttools.layouts.base import Contents
from ckpttools.layouts.checks import check_cover
from ckpttools.storage.source import ListedFile, Listing
from tests.fixture_cases import FIXTURES

NASTY = [
    *(b"-1", b"-0", b"0", b"1.0", b"1e3", b"1e999", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616"),
    *(
        b"true",
        b"null",
        b"NaN",
        b"{}",
        b"[]",
        b'""',
        b'"__metadata__"',
        b'"\\ud800"',
        b'"\\u0000"',
        b'"F4"',
        b'"F6_E2M3"',
        b'"../x"',
    ),
    *(b"[" * 5000, b"9" * 5000, b"\xff", b"\0", b",", b":", b'"', b"{", b"}", b" "),
]


class Memory:
    """A source of bytes."""

    location = "memory"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def listing(self) -> Listing:
        return Listing([ListedFile(path, len(data)) for path, data in self.files.items()])

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        data = self.files[file][offset : offset + len(buffer)]
        if len(data) != len(buffer):
            raise StorageError("read beyond the end", where=file)
        buffer[:] = data


def fixture(case: str) -> dict[str, bytes]:
    root = FIXTURES / "torch" / case / "ckpt"
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.suffix in (".safetensors", ".json")
    }


SINGLE = {k: v for k, v in fixture("safetensors_all_dtypes").items() if k == "model.safetensors"}
SHARDED = fixture("hf_llama_bf16_tied_sharded")
RANKS = fixture("hfwriter_sharded_w2")
CONSOLIDATED = fixture("hfwriter_consolidated_w2")
SMALL = (
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    b'"b":{"dtype":"F4","shape":[3,2],"data_offsets":[8,11]},"c":{"dtype":"I64","shape":[],"data_offsets":[11,19]},'
    b'"d":{"dtype":"U8","shape":[0,3],"data_offsets":[19,19]}}'
)


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with up to four stretches replaced: flipped, cut, doubled, or by something nasty."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.sampled_from([0, 0, 1, 1, 2, 4, 20])))
        new = draw(st.one_of(st.sampled_from(NASTY), st.binary(max_size=3), st.just(data[start:stop] * 2)))
        data = data[:start] + new + data[stop:]
    return data


@st.composite
def tokens(draw: st.DrawFn, text: bytes) -> bytes:
    """JSON with some of its tokens replaced by others, so that most of it still parses."""
    parts = [
        p
        for p in text.replace(b"[", b"\n[\n").replace(b"]", b"\n]\n").replace(b",", b"\n,\n").replace(b":", b"\n:\n").split(b"\n")
        if p
    ]
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(parts) - 1))
        parts[i] = draw(st.sampled_from(NASTY) | st.sampled_from(parts))
    return b"".join(parts)


def blob(text: bytes, data_bytes: int) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def require_sound_contents(contents: Contents, files: Mapping[str, bytes]) -> None:
    for tensor in contents.tensors:
        for piece in (*tensor.pieces, *tensor.replicas):
            assert 0 <= piece.extent.offset
            assert piece.extent.offset + piece.extent.length <= len(files[piece.extent.file])
            assert piece.extent.length == tensor.spec.dtype.length_bytes(piece.box.volume)
        list(check_cover(tensor))
    assert all(f.where for f in contents.findings)
    "".join(f.where + f.expected + f.found for f in contents.findings).encode()  # no half characters


def read_all(files: Mapping[str, bytes]) -> list[Contents]:
    source = Memory(files)
    listing = source.listing()
    found = []
    for layout in (dcp_hf.LAYOUT, plain.LAYOUT):
        for part in layout.sniff(listing, lambda path: files[path][:64]):
            contents = layout.read(source, listing, part)
            require_sound_contents(contents, files)
            found.append(contents)
    return found


@given(st.one_of(tokens(SMALL), mutations(SMALL)), st.sampled_from([19, 19, 19, 18, 20, 0]))
@example(SMALL, 19)
@example(b" " + SMALL, 19)
@example(SMALL + b"\n", 19)
@example(SMALL.replace(b"[2,1]", b"[2,-0]"), 19)
def test_what_has_no_finding_is_taken_by_the_official_parser(text: bytes, data_bytes: int) -> None:
    data = blob(text, data_bytes)
    header = read_header(Memory({"f": data}), "f", 0, len(data))
    if header.findings:
        return
    assert all(e.is_readable for e in header.entries)
    parsed = dict(safetensors.deserialize(data))
    assert {e.name: e.length for e in header.entries} == {name: len(tensor["data"]) for name, tensor in parsed.items()}


@given(mutations(SINGLE["model.safetensors"]))
def test_a_mutated_file(data: bytes) -> None:
    read_all({"model.safetensors": data})


@given(st.data())
@pytest.mark.parametrize("files", [SHARDED, RANKS, CONSOLIDATED], ids=["sharded", "ranks", "consolidated"])
def test_a_set_with_one_mutated_file(files: dict[str, bytes], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(files)))
    content = files[path]
    if path.endswith(".json"):
        changed = data.draw(st.one_of(mutations(content), tokens(content)))
    else:
        header_bytes = 8 + int.from_bytes(content[:8], "little")
        text = data.draw(st.one_of(mutations(content[8:header_bytes]), tokens(content[8:header_bytes])))
        changed = len(text).to_bytes(8, "little") + text + content[header_bytes:]
    assert read_all({**files, path: changed}) != []


@given(st.sampled_from([SHARDED, RANKS, CONSOLIDATED]), st.data())
def test_a_set_with_files_gone_or_renamed(files: dict[str, bytes], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(files)), unique=True, min_size=1))
    numbers = st.integers(0, 5).map(lambda n: f"0000{n}")
    renamed = {name.replace("00001", data.draw(numbers)): files[name] for name in names}
    read_all(renamed)
