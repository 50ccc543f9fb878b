"""One array of zarr's second format: a directory with `.zarray` and one file per chunk. Reads no chunk.

zarr itself takes a chunk that is absent for one full of the fill value; for a checkpoint an absent chunk is damage, so the
fill value is not looked at. Start with `read_array`.

Source: zarr-developers/zarr-specs, docs/v2/v2.0.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from ckpttools.containers.jsons import JsonError, parse_json, shown
from ckpttools.containers.torch_values import MAX_DIMENSION
from ckpttools.dtypes import DType, parse_dtype
from ckpttools.findings import NOTE, Finding
from ckpttools.geometry import row_major_strides, span_elements
from ckpttools.model import Box, Extent, FileEntry, Piece, TensorEntry, TensorSpec
from ckpttools.storage.source import ListedFile, Source, read

METADATA_NAME = ".zarray"
_MAX_METADATA_BYTES = 1 << 20
_MAX_NAMED = 16
"""Absent chunks of one array that are named; who reads a thousand lines about it?"""
_MAX_RANK = 64
_CHUNK_NAME = re.compile(r"\d+(?:[./]\d+)*")
_NUMPY_NAMES = {
    "b1": "bool",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """What an array's directory holds."""

    entry: TensorEntry | None
    """None where `.zarray` does not read."""
    files: tuple[FileEntry, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """`.zarray`, understood."""

    dtype: DType
    is_big_endian: bool
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    is_column_major: bool
    separator: str

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours in a chunk's file; chunks at the edge are stored whole."""
        if self.is_column_major:
            return tuple(reversed(row_major_strides(self.chunks[::-1])))
        return row_major_strides(self.chunks)

    def name(self, index: Sequence[int]) -> str:
        return self.separator.join(map(str, index)) if index else "0"

    def box(self, index: Sequence[int]) -> Box:
        offsets = tuple(i * c for i, c in zip(index, self.chunks, strict=True))
        return Box(offsets, tuple(min(c, n - o) for c, n, o in zip(self.chunks, self.shape, offsets, strict=True)))


def read_array(source: Source, directory: str, name: str, files: Sequence[ListedFile], family: str) -> ZarrArray:
    """The tensor `name` that an array's directory holds. Raises StorageError.

    Args: files: those in the directory, `.zarray` and chunks.
    """
    reader = _Reader(directory, name, family, {f.path[len(directory) + 1 :]: f for f in files})
    metadata = reader.there.get(METADATA_NAME)
    data = b""
    if metadata is not None and metadata.is_regular and metadata.length_bytes <= _MAX_METADATA_BYTES:
        data = read(source, metadata.path, 0, metadata.length_bytes)
    try:
        layout = _parse_layout(data)
    except _UnsupportedError as e:
        return reader.refused(Finding(e.code, f"{directory}/{METADATA_NAME}", e.expected, e.found))
    except JsonError as e:
        code = "bad-json" if data else "empty-file"
        return reader.refused(Finding(code, f"{directory}/{METADATA_NAME}", "the JSON of a zarr array", e.message))
    return reader.take(layout)


class _UnsupportedError(Exception):
    """Metadata of a kind that is not read."""

    def __init__(self, code: str, expected: str, found: object) -> None:
        super().__init__(code)
        self.code = code
        self.expected = expected
        self.found = shown(str(found))


def _parse_layout(data: bytes) -> _Layout:
    """Raises JsonError, _UnsupportedError. Pure."""
    stated = parse_json(data)
    if not isinstance(stated, dict):
        raise _UnsupportedError("bad-container", "an object with shape, chunks and dtype", type(stated).__name__)
    if stated.get("zarr_format") != 2:
        raise _UnsupportedError("unsupported-container", "zarr_format 2", stated.get("zarr_format"))
    if stated.get("compressor") is not None or stated.get("filters"):
        found = stated.get("compressor") or stated.get("filters")
        raise _UnsupportedError("unsupported-container", "no compressor and no filters, as Megatron writes", found)
    order, separator = stated.get("order", "C"), stated.get("dimension_separator", ".")
    shape, chunks = stated.get("shape"), stated.get("chunks")
    if order not in ("C", "F") or separator not in (".", "/"):
        raise _UnsupportedError("bad-container", "order C or F, dimension_separator `.` or `/`", f"{order}, {separator}")
    sizes, steps = _sizes(shape, 0), _sizes(chunks, 1)
    if sizes is None or steps is None or not len(sizes) == len(steps) <= _MAX_RANK:
        raise _UnsupportedError("bad-container", "a shape, and chunks of as many dimensions", f"{shape} and {chunks}")
    dtype, is_big_endian = _parse_dtype(stated.get("dtype"))
    return _Layout(dtype, is_big_endian, sizes, steps, order == "F", str(separator))


def _sizes(value: object, least: int) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(n) is int and least <= n <= MAX_DIMENSION for n in value):
        return tuple(value)
    return None


def _parse_dtype(text: object) -> tuple[DType, bool]:
    """A typestring of numpy, or a bare name (`bfloat16`, which numpy has not)."""
    if isinstance(text, str):
        name = _NUMPY_NAMES.get(text[1:]) if text[:1] in ("<", ">", "|", "=") else text
        try:
            return parse_dtype(name or text), text.startswith(">")
        except ValueError:
            pass
    raise _UnsupportedError("unknown-dtype", "a typestring of numpy, or `bfloat16`", text)


@dataclass(slots=True)
class _Reader:
    """Holds the chunks that there must be against the files that are there."""

    directory: str
    name: str
    family: str
    there: dict[str, ListedFile]
    """By name relative to the directory."""
    findings: list[Finding] = field(default_factory=list)

    def refused(self, finding: Finding) -> ZarrArray:
        return ZarrArray(None, self._files(frozenset(self.there)), (finding,))

    def take(self, layout: _Layout) -> ZarrArray:
        pieces = [p for index in self._indices(layout) if (p := self._piece(layout, index)) is not None]
        wanted = {p.extent.file[len(self.directory) + 1 :] for p in pieces}
        stale = [n for n in self.there if _CHUNK_NAME.fullmatch(n) and n not in wanted and not self._is_in_grid(layout, n)]
        for name in stale[:_MAX_NAMED]:
            expected = f"chunks of a grid of {list(layout.grid)}"
            self.findings.append(
                Finding("unreferenced-file", f"{self.directory}/{name}", expected, "one outside of it", severity=NOTE)
            )
        spec = TensorSpec(self.name, layout.dtype, layout.shape)
        entry = TensorEntry(spec, (self.name,), tuple(pieces), family=self.family)
        return ZarrArray(entry, self._files(frozenset(self.there) - set(stale)), tuple(self.findings))

    def _indices(self, layout: _Layout) -> Iterator[tuple[int, ...]]:
        """Every place of the grid; ends when so many are absent that the grid is not one of these files."""
        count, absent = prod(layout.grid), 0
        for number in range(count):
            index, rest = [], number
            for n in reversed(layout.grid):
                index.append(rest % n)
                rest //= n
            place = tuple(reversed(index))
            if layout.name(place) in self.there:
                yield place
                continue
            absent += 1
            if absent <= _MAX_NAMED:
                where = f"{self.directory}/{layout.name(place)}"
                self.findings.append(Finding("missing-file", where, f"each of the {count} chunks of {self.name}", "no such file"))
            elif absent > len(self.there) + _MAX_NAMED:
                return

    def _piece(self, layout: _Layout, index: tuple[int, ...]) -> Piece | None:
        """A chunk that is whole; None, with a finding, for one that is not."""
        file = self.there[layout.name(index)]
        needed = layout.dtype.length_bytes(prod(layout.chunks))
        if not file.is_regular or file.length_bytes != needed:
            code = "file-too-short" if file.length_bytes < needed else "trailing-bytes"
            code = "missing-file" if not file.is_regular else code if file.length_bytes else "empty-file"
            found = f"{file.length_bytes} bytes" if file.is_regular else "no regular file"
            self.findings.append(Finding(code, file.path, f"{needed} bytes, as a chunk of {self.name} has", found))
            return None
        box = layout.box(index)
        is_dense = box.sizes == layout.chunks and not (layout.is_column_major and len(layout.chunks) > 1)
        length = layout.dtype.length_bytes(span_elements(box.sizes, layout.strides))
        swaps = ("byteswap",) if layout.is_big_endian and layout.dtype.component_bytes > 1 else ()
        return Piece(box, Extent(file.path, 0, length, None if is_dense else layout.strides, swaps))

    def _is_in_grid(self, layout: _Layout, name: str) -> bool:
        index = [int(n) if len(n) < 19 else MAX_DIMENSION for n in name.split(layout.separator) if n.isdigit()]
        if not layout.shape:
            return name == "0"
        return len(index) == len(layout.grid) and all(i < n for i, n in zip(index, layout.grid, strict=True))

    def _files(self, wanted: frozenset[str]) -> tuple[FileEntry, ...]:
        def role(name: str) -> str:
            if name == METADATA_NAME:
                return "manifest"
            return "unreferenced" if name not in wanted else "data" if _CHUNK_NAME.fullmatch(name) else "companion"

        return tuple(FileEntry(f.path, f.length_bytes, role(n), self.family) for n, f in self.there.items())
