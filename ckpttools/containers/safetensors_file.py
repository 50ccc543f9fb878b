"""One safetensors blob: its header read strictly, and a header written as the official writer writes it.

A blob is a length (8 bytes, little-endian), so many bytes of JSON, and the tensors' bytes back to back. It is usually a
whole file; DCP also keeps such blobs under `.distcp` names. Reading never raises on bad content: `read_header` returns
what could be understood and a finding for each thing that is wrong. The official parser is stricter than most and still
accepts repeated keys with equal places and a header that does not start with `{`; here both are findings.
Read `read_header` and `render_header` first; sets of files are in `safetensors_set`.

Source: huggingface/safetensors, README.md (Format) and safetensors/src/tensor.rs, 0.8.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckpttools.containers.jsons import JsonError, parse_json_noting_duplicates, shown
from ckpttools.containers.strangers import HEAD_BYTES, tell
from ckpttools.dtypes import BY_NAME, BY_SAFETENSORS, DType
from ckpttools.findings import Finding
from ckpttools.model import TensorSpec
from ckpttools.storage.source import Source, is_url, read
from ckpttools.units import render_bytes

MAX_HEADER_BYTES = 100_000_000
"""The official parser's limit."""

_MAX_COUNT = 2**63 - 1
_MAX_RANK = 64
_MAX_NAME_CHARACTERS = 65_536
_MAX_DEPTH = 8
_MAX_FINDINGS = 100
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_PAIRS, _UNPAIRED = BY_NAME["float4_e2m1fn_x2"], BY_NAME["float4_e2m1fn"]

_WRITER_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)
_WRITER_RANK = {code: i for i, code in enumerate(_WRITER_ORDER)}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """A tensor as a header describes it, spelled as torch spells it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    length: int
    """Bytes."""
    is_readable: bool = True
    """Whether its bytes are wholly inside the blob, as many as the shape needs, and named once."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """What the header of one blob says, and what is wrong with it."""

    file: str
    entries: tuple[SafetensorsEntry, ...] = ()
    """In the order of the header."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    header_bytes: int = 0
    """Bytes of the length field and the JSON together; 0 when they could not be read."""
    findings: tuple[Finding, ...] = ()


def read_header(source: Source, file: str, offset: int, length_bytes: int) -> SafetensorsHeader:
    """The header of the blob at [offset, offset + length_bytes) of a file, which must be inside the file.

    Raises: StorageError: when the storage breaks; never for what the bytes say.
    """
    if length_bytes < _LENGTH_BYTES:
        code = "file-too-short" if length_bytes else "empty-file"
        expected = f"at least {_LENGTH_BYTES} bytes: the length of a safetensors header"
        return SafetensorsHeader(file, findings=(Finding(code, file, expected, render_bytes(length_bytes)),))
    # one round trip is enough for most headers in an object store; a local file is read to the byte
    start = read(source, file, offset, min(length_bytes, 65_536 if is_url(source.location) else _LENGTH_BYTES))
    json_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
    problem = _length_problem(json_bytes, length_bytes - _LENGTH_BYTES)
    if problem:
        stranger = tell(read(source, file, offset, min(length_bytes, HEAD_BYTES)), is_safetensors=True)
        if stranger:
            finding = Finding("bad-header", file, "a safetensors file", stranger.what, stranger.remedy)
        else:
            finding = Finding("bad-header", f"{file} at byte {offset}", *problem)
        return SafetensorsHeader(file, findings=(finding,))
    data = start[_LENGTH_BYTES : _LENGTH_BYTES + json_bytes]
    if len(data) < json_bytes:
        data += read(source, file, offset + _LENGTH_BYTES + len(data), json_bytes - len(data))
    return parse_header(data, file, offset, length_bytes)


def _length_problem(json_bytes: int, room_bytes: int) -> tuple[str, str] | None:
    if json_bytes > room_bytes:
        return f"a header of at most {room_bytes} bytes, which is what follows", (
            f"a header length of {json_bytes} bytes: the file was cut short, or is no safetensors file"
        )
    if json_bytes > MAX_HEADER_BYTES:
        return f"a header of at most {MAX_HEADER_BYTES} bytes", f"a header length of {json_bytes} bytes"
    if json_bytes < 2:
        return "a header of at least 2 bytes: `{}`", f"a header length of {render_bytes(json_bytes)}"
    return None


def parse_header(data: bytes, file: str, offset: int, length_bytes: int) -> SafetensorsHeader:
    """What the JSON of a blob at [offset, offset + length_bytes) of a file says. Pure."""
    header_bytes = _LENGTH_BYTES + len(data)
    at = offset + _LENGTH_BYTES
    if not data.startswith(b"{"):
        finding = Finding("bad-header", f"{file} at byte {at}", "a header that starts with `{`", f"starts with {data[:8]!r}")
        return SafetensorsHeader(file, header_bytes=header_bytes, findings=(finding,))
    try:
        table, duplicates = parse_json_noting_duplicates(data, max_depth=_MAX_DEPTH)
    except JsonError as e:
        finding = Finding("bad-header", f"{file} at byte {at + (e.position or 0)}", "JSON", e.message)
        return SafetensorsHeader(file, header_bytes=header_bytes, findings=(finding,))
    if not isinstance(table, dict):  # a text that starts with `{` and parses is an object; said for the type checker
        return SafetensorsHeader(file, header_bytes=header_bytes)
    findings: list[Finding] = []
    metadata = _parse_metadata(table.pop(_METADATA, None), file, findings)
    repeated = _check_duplicates(duplicates, table, file, findings)
    places = _Places(file, offset + header_bytes, length_bytes - header_bytes)
    entries = [
        entry
        for name, fields in table.items()
        if (entry := _parse_entry(name, fields, places, name not in repeated, findings)) is not None
    ]
    findings += places.check()
    return SafetensorsHeader(file, tuple(entries), metadata, header_bytes, tuple(_at_most(findings, file)))


def _parse_metadata(value: object, file: str, findings: list[Finding]) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        findings.append(Finding("bad-header", f"{_METADATA} in {file}", "an object of texts", _kind(value)))
        return {}
    findings += [
        Finding("bad-header", f"{_METADATA} in {file}", f"a text under `{shown(key)}`", _kind(text))
        for key, text in value.items()
        if not isinstance(text, str)
    ]
    return {key: text for key, text in value.items() if isinstance(text, str)}


def _check_duplicates(duplicates: Sequence[str], table: dict[str, object], file: str, findings: list[Finding]) -> set[str]:
    """A finding per repeated key; returns those that are tensors, of which nobody can say which place is meant."""
    for key in duplicates:
        if key in table:
            findings.append(Finding("duplicate-name", f"{shown(key)} in {file}", "one entry in the header", "several"))
        else:
            findings.append(Finding("bad-header", file, "keys that stand once", f"the key `{shown(key)}` twice in one object"))
    return set(duplicates)


class _Places:
    """The stretches of the data that tensors of one blob claim; together they must be all of it, each byte once."""

    def __init__(self, file: str, start: int, length: int) -> None:
        self.file = file
        self.start = start
        """Byte of the file where the tensors' data begins."""
        self.length = length
        """Bytes of data."""
        self.claims: list[tuple[int, int, str]] = []
        self.has_unknown = False
        """Whether some tensor's place could not be read, so that gaps prove nothing."""

    def check(self) -> list[Finding]:
        """Gaps, overlaps, bytes after the last tensor and bytes that are not there."""
        findings: list[Finding] = []
        reached, previous = 0, ""
        for begin, end, name in sorted(self.claims):
            if begin < reached:
                findings.append(
                    Finding(
                        "extent-overlap",
                        f"{shown(name)} in {self.file} at byte {self.start + begin}",
                        f"data from byte {self.start + reached} on, where `{shown(previous)}` ends",
                        f"data from byte {self.start + begin} on",
                    )
                )
            elif begin > reached and not self.has_unknown:
                findings.append(self._gap(reached, begin, name))
            if end >= reached:
                reached, previous = end, name
        if reached > self.length:
            findings.append(self._too_short(reached))
        elif reached < self.length and not self.has_unknown:
            findings.append(
                Finding(
                    "trailing-bytes",
                    f"{self.file} at byte {self.start + reached}",
                    f"the end after {render_bytes(self.start + reached)}",
                    f"{render_bytes(self.length - reached)} more",
                )
            )
        return findings

    def _gap(self, reached: int, begin: int, name: str) -> Finding:
        return Finding(
            "extent-gap",
            f"{shown(name)} in {self.file} at byte {self.start + begin}",
            f"data from byte {self.start + reached} on, right after the one before",
            f"data from byte {self.start + begin} on: {render_bytes(begin - reached)} belong to no tensor",
        )

    def _too_short(self, reached: int) -> Finding:
        beyond = [name for _, end, name in sorted(self.claims) if end > self.length]
        which = f"`{shown(beyond[0])}`" + (f" and {len(beyond) - 1} more tensors" if len(beyond) > 1 else "")
        return Finding(
            "file-too-short",
            f"{shown(beyond[0])} in {self.file} at byte {self.start + self.length}",
            render_bytes(self.start + reached),
            f"{render_bytes(self.start + self.length)}, so {which} cannot be read whole",
        )


def _parse_entry(name: str, fields: object, places: _Places, is_unique: bool, findings: list[Finding]) -> SafetensorsEntry | None:
    """One tensor of the header; None, with findings, when its dtype, shape or place cannot be understood."""
    if not isinstance(fields, dict):
        places.has_unknown = True
        findings.append(_complaint(name, places.file, ("bad-header", "an object with dtype, shape, data_offsets", _kind(fields))))
        return None
    code, shape, place = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    problems = [_name_problem(name), _dtype_problem(code, dtype), _shape_problem(shape, fields.get("shape"))]
    if place is None or len(place) != 2 or place[0] > place[1]:
        places.has_unknown = True
        found = f"data_offsets {_kind(fields.get('data_offsets'))}"
        problems.append(("bad-header", "data_offsets [begin, end] with 0 <= begin <= end", found))
        place = None
    else:
        places.claims.append((place[0], place[1], name))
    entry = None
    if dtype is not None and shape is not None and place is not None and problems[2] is None:
        begin, end = place
        problems.append(_length_mismatch(dtype, shape, begin, end))
        is_readable = is_unique and problems[-1] is None and end <= places.length
        entry = SafetensorsEntry(name, *_as_torch(dtype, tuple(shape)), places.start + begin, end - begin, is_readable)
    findings += [_complaint(name, places.file, problem) for problem in problems if problem is not None]
    return entry


_Problem = tuple[str, str, str]
"""Finding code, what was expected, what was found."""


def _complaint(name: str, file: str, problem: _Problem) -> Finding:
    code, expected, found = problem
    return Finding(code, f"{shown(name)} in {file}", expected, found)


def _counts(value: object) -> list[int] | None:
    """A list of integers in [0, 2^63); None for everything else. By class, because True is an int and 2.0 equals 2."""
    if not isinstance(value, list):
        return None
    for n in value:
        if n.__class__ is not int or not 0 <= n <= _MAX_COUNT:
            return None
    return value


def _name_problem(name: str) -> _Problem | None:
    if "\0" in name or len(name) > _MAX_NAME_CHARACTERS:
        expected = f"a name of at most {_MAX_NAME_CHARACTERS} characters without NUL"
        return "bad-header", expected, f"{len(name)} characters" + ", NUL among them" * ("\0" in name)
    return None


def _dtype_problem(code: object, dtype: DType | None) -> _Problem | None:
    if dtype is not None:
        return None
    return "unknown-dtype" if isinstance(code, str) else "bad-header", "a dtype of safetensors", _kind(code)


def _shape_problem(shape: list[int] | None, stored: object) -> _Problem | None:
    """A shape is a list of counts; their product, zeros taken as 1 so that no order of factors matters, is one too."""
    if shape is None:
        return "bad-header", "a shape of non-negative integers below 2^63", f"shape {_kind(stored)}"
    if len(shape) > _MAX_RANK:
        return "bad-header", f"a shape of at most {_MAX_RANK} dimensions", f"{len(shape)} dimensions"
    if not 0 < prod(shape) <= _MAX_COUNT and prod(n or 1 for n in shape) > _MAX_COUNT:
        return "bad-header", "a shape of fewer than 2^63 elements", f"shape {_kind(shape)}"
    return None


def _length_mismatch(dtype: DType, shape: list[int], begin: int, end: int) -> _Problem | None:
    # the header counts single 4-bit floats, the table's row for its code counts pairs
    bits = (_UNPAIRED.bits if dtype is _PAIRS else dtype.bits) * prod(shape)
    if bits == 8 * (end - begin):
        return None
    needed = f"{bits // 8} bytes" if bits % 8 == 0 else f"a whole number of bytes, not {bits} bits,"
    return (
        "bad-header",
        f"{needed} for {dtype.safetensors} {shape}",
        f"{render_bytes(end - begin)} (data_offsets [{begin}, {end}])",
    )


def _as_torch(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Pairs of 4-bit floats, as torch counts them; a row with an odd number has no pairs and stays as stored."""
    if dtype is not _PAIRS:
        return dtype, shape
    if shape and shape[-1] % 2 == 0:
        return _PAIRS, (*shape[:-1], shape[-1] // 2)
    return _UNPAIRED, shape


def _kind(value: object) -> str:
    """A value of the header for a message."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "an object"
    return shown(json.dumps(value))


def _at_most(findings: list[Finding], file: str) -> list[Finding]:
    """A damaged header of 100,000 tensors has as many findings; nobody reads so many."""
    if len(findings) <= _MAX_FINDINGS:
        return findings
    rest = len(findings) - _MAX_FINDINGS
    return [*findings[:_MAX_FINDINGS], Finding("bad-header", file, "a sound header", f"{rest} more findings, not listed")]


def stored_form(spec: TensorSpec) -> tuple[str, tuple[int, ...]] | None:
    """(code, shape) of a tensor in a safetensors header; None where the format has no place for it. Pure."""
    if spec.dtype is _PAIRS:
        return ("F4", (*spec.shape[:-1], 2 * spec.shape[-1])) if spec.shape else None
    is_whole_bytes = spec.dtype.bits * spec.volume % 8 == 0
    if spec.dtype is _UNPAIRED:  # a row of an even number would be read back as pairs
        return ("F4", spec.shape) if is_whole_bytes and spec.shape and spec.shape[-1] % 2 else None
    return (spec.dtype.safetensors, spec.shape) if spec.dtype.safetensors and is_whole_bytes else None


def canonical_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order in which the official writer lays tensors out: by dtype, widest first, then by name. Pure.

    Raises: ValueError: when the format has no place for one of them; `stored_form` tells which.
    """

    def key(spec: TensorSpec) -> tuple[int, bytes]:
        stored = stored_form(spec)
        if stored is None:
            raise ValueError(f"safetensors has no {spec.dtype} of shape {list(spec.shape)}")
        return _WRITER_RANK[stored[0]], spec.name.encode()

    return sorted(specs, key=key)


def render_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The header (length field, JSON, padding) of a file that holds `specs` in canonical order, back to back. Pure.

    The bytes are those of the official writer, but that it writes the metadata in no fixed order and here it is sorted.
    """
    table: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for spec in canonical_order(specs):
        stored = stored_form(spec)
        if stored is not None:
            code, shape = stored
            table[spec.name] = {"dtype": code, "shape": shape, "data_offsets": (offset, offset + spec.length_bytes)}
        offset += spec.length_bytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
