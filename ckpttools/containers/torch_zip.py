"""Strict reading of the zip archives that torch writes: where each record's bytes lie, and every disagreement.

torch's own reader checks no CRC, takes the first of two records with one name and ignores local headers; Python's
takes the last and believes them. Where readers can be led to different bytes, that is a finding here, not a choice.

Source: pytorch/pytorch, caffe2/serialize/inline_container.cc (writer and its alignment rule); APPNOTE.TXT of PKWARE.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ckpttools.containers.region import Region
from ckpttools.findings import NOTE, WARNING, Finding

_LOCAL, _CENTRAL, _END, _END64, _LOCATOR64, _DESCRIPTOR = (
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"PK\x05\x06",
    b"PK\x06\x06",
    b"PK\x06\x07",
    b"PK\x07\x08",
)
STORED, DEFLATED = 0, 8
_KNOWN_FLAGS = 0x0808
"""Bit 3: sizes follow the data. Bit 11: names are UTF-8. What torch sets; compression levels (bits 1, 2) also pass."""
_MAX_RECORDS = 4_000_000
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_ROW = struct.Struct("<4xHHHH4xIIIHHH8xI")
"""Of the directory, after its mark: made by, needed, flags, method; CRC, lengths, lengths of the texts; the header's place."""
_NUMBERS = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One member of an archive."""

    name: str
    """Without the top folder."""
    offset: int
    """First byte of its data, from the start of the region."""
    length: int
    """Bytes after decompression."""
    stored_length: int
    """Bytes in the archive."""
    method: int
    crc32: int


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """What an archive holds."""

    root: str
    """The top folder that all names share."""
    records: dict[str, ZipRecord]
    findings: tuple[Finding, ...]
    has_checksums: bool
    """False when the writer switched CRC-32 off, which leaves every field zero."""


@dataclass(slots=True)
class _Entry:
    """A row of the central directory, as it stands there."""

    name: str
    stored_name: bytes
    flags: int
    method: int
    crc32: int
    stored_length: int
    length: int
    header_offset: int


@dataclass(frozen=True, slots=True)
class _Directory:
    """Where the central directory lies, and how many rows it has."""

    offset: int
    length: int
    total: int


def read_zip(region: Region) -> ZipDirectory:
    """The members of the archive in a region; what is wrong with it is in `findings`, and then records may be missing."""
    findings: list[Finding] = []
    try:
        end = _find_end(region, findings)
        if end is None:
            return ZipDirectory("", {}, tuple(findings), True)
        entries = list(_central_entries(region, end, findings))
    except (ValueError, struct.error) as e:
        findings.append(Finding("bad-container", region.where(), "a zip central directory", str(e)))
        return ZipDirectory("", {}, tuple(findings), True)
    root = _common_root(entries, region, findings)
    records: dict[str, ZipRecord] = {}
    folded: set[str] = set()
    for entry in entries:
        name = entry.name[len(root) :]
        if name.casefold() in folded:
            found = f"`{entry.name}` twice"
            findings.append(Finding("duplicate-name", region.where(entry.header_offset), "each zip member once", found))
            continue
        folded.add(name.casefold())
        record = _locate(region, entry, name, end.offset, findings)
        if record is not None:
            records[name] = record
    findings += _check_apart(region, records)
    filled = [r for r in records.values() if r.length]
    has_checksums = not filled or any(r.crc32 for r in filled)
    if not has_checksums:
        findings.append(Finding("checksums-off", region.where(), severity=NOTE))
    return ZipDirectory(root, records, tuple(findings), has_checksums)


def _find_end(region: Region, findings: list[Finding]) -> _Directory | None:
    """Where the central directory is; None with a finding when there is none."""
    tail_offset = max(0, region.length - 22 - _U16)
    tail = region.read(tail_offset, region.length - tail_offset)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < 22:
        missing = f"none in the last {len(tail)} of {region.length} bytes: the archive is cut short"
        findings.append(Finding("file-too-short", region.where(), "a zip end record", missing))
        return None
    disk, directory_disk, here, total, length, offset, comment = struct.unpack_from("<HHHHIIH", tail, at + 4)
    after = len(tail) - at - 22
    if after != comment:
        at_byte = region.where(tail_offset + at + 22 + comment)
        findings.append(Finding("trailing-bytes", at_byte, "the end of the archive", f"{after - comment} more bytes"))
    if disk or directory_disk or here != total:
        raise ValueError("the archive is spread over several files")
    directory = _Directory(offset, length, total)
    stop = tail_offset + at
    if stop >= 20 and region.read(stop - 20, 4) == _LOCATOR64:
        directory, stop = _find_end64(region, stop - 20, directory)
    if directory.total > _MAX_RECORDS:
        raise ValueError(f"{directory.total} members, more than the limit of {_MAX_RECORDS}")
    if directory.offset + directory.length != stop:  # else an archive behind another, of which readers take either
        raise ValueError(f"the directory ends at byte {directory.offset + directory.length}, and its end record is at {stop}")
    return directory


def _find_end64(region: Region, locator: int, small: _Directory) -> tuple[_Directory, int]:
    """The directory as the zip64 end record has it, and where that record begins; it must agree with the small one."""
    (end64,) = struct.unpack("<Q", region.read(locator + 8, 8))
    record = region.read(end64, 56)
    if record[:4] != _END64 or end64 + 12 + int.from_bytes(record[4:12], "little") != locator:
        raise ValueError(f"no zip64 end record at byte {end64} that ends at its locator")
    total, length, offset = struct.unpack_from("<QQQ", record, 32)
    for name, stated, large, limit in (
        ("entries", small.total, total, _U16),
        ("length", small.length, length, _U32),
        ("offset", small.offset, offset, _U32),
    ):
        if stated not in (large, limit):
            raise ValueError(f"two end records disagree about the {name} of the directory: {stated} and {large}")
    return _Directory(offset, length, total), end64


def _central_entries(region: Region, directory: _Directory, findings: list[Finding]) -> Iterator[_Entry]:
    offset, at = directory.offset, 0
    data = region.read(offset, directory.length)
    for _ in range(directory.total):
        if data[at : at + 4] != _CENTRAL or at + 46 > len(data):
            raise ValueError(f"no directory entry at byte {offset + at}")
        _, _, flags, method, crc, stored, plain, name_length, extra_length, comment_length, header = _ROW.unpack_from(data, at)
        stop = at + 46 + name_length + extra_length
        if stop + comment_length > len(data):
            raise ValueError(f"a directory entry at byte {offset + at} is longer than the directory")
        name = data[at + 46 : at + 46 + name_length]
        if extra_length:
            stored, plain, header = _zip64(data[at + 46 + name_length : stop], stored, plain, header)
        yield _Entry(name.decode("utf-8", "surrogateescape"), name, flags, method, crc, stored, plain, header)
        at = stop + comment_length
    if at != len(data):
        found = f"{len(data) - at} more bytes"
        findings.append(Finding("container-inconsistent", region.where(offset + at), "the end of the directory", found))


def _zip64(extra: bytes, stored: int, plain: int, header: int) -> tuple[int, int, int]:
    """The three numbers, those that do not fit in 32 bits taken from the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            plain = next(values) if plain == _U32 else plain
            stored = next(values) if stored == _U32 else stored
            header = next(values) if header == _U32 else header
        at += 4 + length
    return stored, plain, header


def _common_root(entries: list[_Entry], region: Region, findings: list[Finding]) -> str:
    """The top folder, taken from the first entry as torch does; an entry outside it is a finding."""
    root = entries[0].name.partition("/")[0] + "/" if entries and "/" in entries[0].name else ""
    for entry in entries:
        if not entry.name.startswith(root):
            where = region.where(entry.header_offset)
            findings.append(Finding("bad-container", where, f"every member in `{root}`", f"`{entry.name}`"))
    entries[:] = [e for e in entries if e.name.startswith(root)]
    return root


def _locate(region: Region, entry: _Entry, name: str, directory: int, findings: list[Finding]) -> ZipRecord | None:
    """A member's data, found by its local header; None when the header does not belong to the directory entry."""
    unknown = entry.flags & ~(_KNOWN_FLAGS | 0x0006)
    where = f"`{entry.name}` in {region.where(entry.header_offset)}"
    if unknown or entry.method not in (STORED, DEFLATED):
        found = f"flags {entry.flags:#06x}, method {entry.method}"
        findings.append(Finding("bad-container", where, "a member that is stored or deflated, not encrypted", found))
        return None
    if entry.header_offset + 30 > directory:
        findings.append(Finding("bad-container", where, f"a header before byte {directory}", "one after it"))
        return None
    local = region.read(entry.header_offset, min(30 + len(entry.stored_name), directory - entry.header_offset))
    name_length, extra_length = struct.unpack_from("<HH", local, 26)
    offset = entry.header_offset + 30 + name_length + extra_length
    if local[:4] != _LOCAL or offset + entry.stored_length > directory:
        findings.append(Finding("bad-container", where, "a local header and the data that it announces", repr(local[:4])))
        return None
    if name_length != len(entry.stored_name) or local[30:] != entry.stored_name:
        local_name = region.read(entry.header_offset + 30, name_length).decode("utf-8", "surrogateescape")
        findings.append(Finding("bad-container", where, "the same name in both headers", f"`{local_name}`"))
        return None
    if entry.method == STORED and entry.length != entry.stored_length:
        found = f"{entry.stored_length} and {entry.length} bytes"
        findings.append(Finding("bad-container", where, "one length for a stored member", found))
        return None
    _check_copies(region, entry, offset + entry.stored_length, local, directory, where, findings)
    return ZipRecord(name, offset, entry.length, entry.stored_length, entry.method, entry.crc32)


def _check_copies(
    region: Region, entry: _Entry, stop: int, local: bytes, directory: int, where: str, findings: list[Finding]
) -> None:
    """Whether the other places that state a member's CRC and lengths agree with the directory."""
    (method,) = struct.unpack_from("<H", local, 8)
    copies = [("local header", _NUMBERS.unpack_from(local, 14))]
    after = region.read(stop, 24) if stop + 24 <= directory else b""
    if after.startswith(_DESCRIPTOR):
        wide = _U32 in copies[0][1][1:] or max(entry.stored_length, entry.length) >= _U32
        copies.append(("data descriptor", struct.unpack_from("<IQQ" if wide else "<III", after, 4)))
    if method != entry.method:
        findings.append(Finding("bad-container", where, f"method {entry.method} in both headers", f"method {method}"))
    for place, (crc, stored, plain) in copies:
        if (crc, stored, plain) == (entry.crc32, entry.stored_length, entry.length):
            continue
        stated = ((crc, entry.crc32), (stored, entry.stored_length), (plain, entry.length))
        if any(copy not in (0, _U32, value) for copy, value in stated):
            found = f"CRC-32 {crc:08x}, {stored} and {plain} bytes in the {place}"
            expected = f"CRC-32 {entry.crc32:08x}, {entry.stored_length} and {entry.length} bytes as in the directory"
            severity = WARNING if (stored, plain) == (entry.stored_length, entry.length) else ""
            findings.append(Finding("container-inconsistent" if severity else "bad-container", where, expected, found))


def _check_apart(region: Region, records: dict[str, ZipRecord]) -> Iterator[Finding]:
    """Members whose bytes overlap: a way to show different readers different content."""
    in_order = sorted((r for r in records.values() if r.stored_length), key=lambda r: r.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.stored_length > after.offset:
            found = f"`{before.name}` ends at byte {before.offset + before.stored_length}"
            yield Finding("extent-overlap", f"`{after.name}` in {region.where(after.offset)}", "members apart", found)
