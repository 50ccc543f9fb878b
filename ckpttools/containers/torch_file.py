"""Opens what `torch.save` wrote, in every dialect, into a nested value and the storages that its tensors point into.

Dialects: the zip archive (since 1.6; TorchScript archives are the same with code beside it), and the stream of pickles
before it. The tar of the first releases and the `PYTORCH1` preview are recognised and refused by name; a plain pickle is
read as a value without storages. Nothing is executed.

Source: pytorch/pytorch, torch/serialization.py, v2.13.0.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

from ckpttools.containers.jsons import shown
from ckpttools.containers.local_boxes import NOTE_NAME, LocalBoxes, parse_local_boxes
from ckpttools.containers.region import Region
from ckpttools.containers.strangers import HEAD_BYTES, tell
from ckpttools.containers.torch_zip import DEFLATED, STORED, ZipDirectory, ZipRecord, read_zip
from ckpttools.dtypes import BY_STORAGE_CLASS
from ckpttools.findings import Finding
from ckpttools.model import Encoding, StoredChecksum
from ckpttools.pickles.reader import Pickled, PickleError, read_pickle
from ckpttools.pickles.records import Global
from ckpttools.pickles.table import judge

ZIP_MAGIC = b"PK\x03\x04"
STREAM_MAGIC = 0x1950A86A20F9469CFC6C
_STREAM_PROTOCOL = 1001
_MAX_PICKLE_BYTES = 1 << 30
_FREE_DEFLATED_BYTES = 16 << 20
_MAX_PICKLE_RATIO = 64
"""A deflated pickle that grows a thousandfold is a bomb; real ones shrink to a tenth."""


@dataclass(frozen=True, slots=True)
class StoredStorage:
    """The bytes that one or several tensors view."""

    offset: int
    """From the start of the file, or of the decoded stream."""
    length: int
    """Bytes."""
    encoding: Encoding | None = None


@dataclass(slots=True)
class TorchFile:
    """An opened torch file."""

    dialect: str
    """`zip`, `torchscript`, `stream` or `pickle`; empty when it could not be opened."""
    value: object = None
    storages: dict[str, StoredStorage] = field(default_factory=dict)
    is_big_endian: bool = False
    root: str = ""
    """The top folder of a zip archive: the name, without its ending, under which torch wrote the file; `archive` for a stream."""
    note: LocalBoxes | None = None
    """What the tensors are parts of, where the file says it."""
    checksums: list[StoredChecksum] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class KnownPickles:
    """The pickles of a snapshot's files that were read: most ranks write the same bytes, and values are inert, so one serves all.

    So 512 ranks take the time and the memory of a few, and files with the same pickle have the same object as their value.
    """

    _by_bytes: dict[bytes, Pickled] = field(default_factory=dict)
    _room_bytes: int = 64 << 20

    def read(self, data: bytes) -> Pickled:
        """What a pickle holds. Raises PickleError."""
        known = self._by_bytes.get(data)
        if known is not None:
            return known
        pickled = read_pickle(data)
        if len(data) <= self._room_bytes:
            self._room_bytes -= len(data)
            self._by_bytes[data] = pickled
        return pickled


def read_torch_file(region: Region, known: KnownPickles | None = None) -> TorchFile:
    """The value in a torch file and its storages; what is wrong becomes findings, and the rest is still there.

    Args: known: shared by the files of one snapshot.
    Raises: StorageError: when the storage fails. MissingExtraError: when a codec is needed that is not installed.
    """
    if region.length == 0:
        return TorchFile("", findings=[Finding("empty-file", region.where(), "a torch file", "0 bytes")])
    head = region.read(0, min(64, region.length))
    if head.startswith(ZIP_MAGIC):
        return _read_archive(region, known or KnownPickles())
    refused = _refused_dialect(region, head)
    if refused:
        return TorchFile("", findings=[refused])
    return _read_stream(region)


def _refused_dialect(region: Region, head: bytes) -> Finding | None:
    """A finding for the two dialects that only torch before 0.2 wrote."""
    expected = "a zip archive or a stream of pickles"
    if head.startswith(b"PYTORCH1"):
        return Finding("unsupported-container", region.where(), expected, "the PYTORCH1 preview format")
    if region.length >= 512 and region.read(257, 5) == b"ustar":
        remedy = "load it with a torch release before 2.6 that you trust it with, and save it again"
        return Finding("unsupported-container", region.where(), expected, "a tar archive of torch before 0.2", remedy)
    return None


def _read_archive(region: Region, known: KnownPickles) -> TorchFile:
    directory = read_zip(region)
    file = TorchFile("zip", root=directory.root.rstrip("/"), findings=list(directory.findings))
    if "constants.pkl" in directory.records and any(n.startswith("code/") for n in directory.records):
        file.dialect = "torchscript"
    if not directory.records:
        return file
    if directory.has_checksums:
        file.checksums = [c for r in directory.records.values() if (c := _checksum(region, r))]
    if "data.pkl" not in directory.records:
        return _of_another_program(region, directory, file)
    if region.read(0, 4) == ZIP_MAGIC and "version" not in directory.records:
        file.findings.append(Finding("bad-container", region.where(), "a record `version`, as torch writes", "none"))
    file.is_big_endian = _byteorder(region, directory, file.findings) == b"big"
    for name, record in directory.records.items():
        folder, _, key = name.partition("/")
        if folder == "data" and key:
            file.storages[key] = _storage(region, record)
    file.note = _read_note(region, directory, file.findings)
    pickled = directory.records["data.pkl"]
    data = _record_bytes(region, pickled, file.findings)
    if data is not None:
        if directory.has_checksums and zlib.crc32(data) != pickled.crc32:
            expected, found = f"CRC-32 {pickled.crc32:08x}", f"{zlib.crc32(data):08x}"
            file.findings.append(Finding("checksum-mismatch", f"`data.pkl` in {region.where(pickled.offset)}", expected, found))
        file.value = _read_value(data, f"`data.pkl` in {region.where(pickled.offset)}", file.findings, known)
    return file


def _of_another_program(region: Region, directory: ZipDirectory, file: TorchFile) -> TorchFile:
    """A zip archive without the one record that torch cannot do without."""
    names = [record.name for record in directory.records.values()]
    found = ", ".join(f"`{shown(name)}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    expected = "a zip archive of torch, with a record `data.pkl`"
    remedy = "if a program other than torch wrote it, unpack it or save it as safetensors; else restore it from a good copy"
    file.findings.append(Finding("bad-container", region.where(), expected, f"no such record, but {found}", remedy))
    return file


def _read_note(region: Region, directory: ZipDirectory, findings: list[Finding]) -> LocalBoxes | None:
    """The note of ours in an archive; None where there is none, and with a finding when it cannot be used."""
    record = directory.records.get(NOTE_NAME)
    data = _record_bytes(region, record, findings) if record is not None else None
    if record is None or data is None:
        return None
    try:
        return parse_local_boxes(data)
    except ValueError as e:
        where = f"`{record.name}` in {region.where(record.offset)}"
        findings.append(Finding("bad-container", where, "what the tensors are parts of", str(e)))
        return None


def _byteorder(region: Region, directory: ZipDirectory, findings: list[Finding]) -> bytes:
    """`little` or `big`; files before 2.1 do not say, and were little-endian on all machines that matter."""
    record = directory.records.get("byteorder")
    if record is None or record.length > 16:
        return b"little"
    order = _record_bytes(region, record, findings) or b""
    if order not in (b"little", b"big"):
        findings.append(Finding("bad-container", f"`byteorder` in {region.where(record.offset)}", "little or big", repr(order)))
    return order


def _checksum(region: Region, record: ZipRecord) -> StoredChecksum | None:
    """The CRC-32 of a member, over its decoded bytes; a member compressed inside a compressed item has none to check."""
    storage = _storage(region, record)
    if region.encoding is not None and record.method == DEFLATED:
        return None
    return StoredChecksum(region.file, storage.offset, storage.length, record.crc32, record.name, storage.encoding)


def _storage(region: Region, record: ZipRecord) -> StoredStorage:
    offset = region.offset + record.offset
    if record.method == STORED:
        return StoredStorage(offset, record.length, region.encoding)
    return StoredStorage(0, record.length, Encoding("deflate", offset, record.stored_length, record.length))


def _record_bytes(region: Region, record: ZipRecord, findings: list[Finding]) -> bytes | None:
    """A small member as it decodes; None with a finding when it is too large to be one or does not decode."""
    where = f"`{record.name}` in {region.where(record.offset)}"
    most = _MAX_PICKLE_BYTES if record.method == STORED else max(_FREE_DEFLATED_BYTES, _MAX_PICKLE_RATIO * record.stored_length)
    if record.length > min(most, _MAX_PICKLE_BYTES):
        findings.append(Finding("pickle-limit", where, f"at most {min(most, _MAX_PICKLE_BYTES)} bytes", f"{record.length} bytes"))
        return None
    stored = region.read(record.offset, record.stored_length)
    if record.method == STORED:
        return stored
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, record.length)
    except zlib.error as e:
        findings.append(Finding("bad-container", where, "deflated bytes", str(e)))
        return None
    if len(data) != record.length:
        findings.append(Finding("bad-container", where, f"{record.length} bytes", f"{len(data)} bytes"))
        return None
    return data


def _read_value(data: bytes, where: str, findings: list[Finding], known: KnownPickles) -> object:
    """A pickle's value; None with a finding when it does not parse. Names that run code elsewhere are findings too."""
    try:
        pickled = known.read(data)
    except PickleError as e:
        findings.append(Finding(e.code, where, "a pickle", str(e)))
        return None
    findings += unsafe_globals(pickled, where)
    return pickled.value


def unsafe_globals(pickled: Pickled, where: str) -> list[Finding]:
    """A finding for each name in a pickle that runs code when another tool loads it."""
    unsafe = sorted(str(g) for g in pickled.globals if judge(g) == "unsafe")
    return [Finding("unsafe-pickle", where, "only data", f"a reference to `{name}`") for name in unsafe]


def _read_stream(region: Region) -> TorchFile:
    """The pre-1.6 dialect: magic, protocol, system, value, storage keys (all pickles), then each storage's count and bytes."""
    file = TorchFile("pickle")
    where = region.where()
    try:
        parts = _growing_head(region)
    except PickleError as e:
        stranger = tell(region.read(0, min(HEAD_BYTES, region.length)))
        found = stranger.what if stranger else f"neither a zip archive nor a whole pickle: {e}"
        file.findings.append(Finding(e.code, where, "a torch file", found, stranger.remedy if stranger else ""))
        return file
    for pickled in parts:
        file.findings += unsafe_globals(pickled, where)
    if len(parts) == 1:
        file.value = parts[0].value
        if parts[0].stop != region.length:
            found = f"{region.length - parts[0].stop} more bytes"
            file.findings.append(Finding("trailing-bytes", region.where(parts[0].stop), "the end of the pickle", found))
        return file
    file.dialect = "stream"
    protocol, system, value, keys = (p.value for p in parts[1:])
    if protocol != _STREAM_PROTOCOL or not isinstance(system, dict) or not isinstance(keys, list):
        file.findings.append(Finding("bad-container", where, "protocol 1001, a system record and storage keys", repr(protocol)))
        return file
    file.is_big_endian = system.get("little_endian") is False
    file.value = value
    _locate_stream_storages(region, file, keys, parts[-1].stop)
    return file


def _growing_head(region: Region) -> list[Pickled]:
    """The pickles at the start of a region. There is no directory, so more is read until they parse."""
    length_bytes = min(region.length, 1 << 20)
    while True:
        head = region.read(0, length_bytes)
        try:
            return _stream_pickles(head)
        except PickleError as e:
            if length_bytes >= min(region.length, _MAX_PICKLE_BYTES) or not e.is_cut:
                raise
            length_bytes = min(region.length, length_bytes * 8, _MAX_PICKLE_BYTES)


def _stream_pickles(data: bytes) -> list[Pickled]:
    """The five pickles of a stream, or the one of a plain pickle."""
    first = read_pickle(data)
    if first.value != STREAM_MAGIC:
        return [first]
    parts = [first]
    while len(parts) < 5:
        parts.append(read_pickle(data, offset=parts[-1].stop))
    return parts


def _locate_stream_storages(region: Region, file: TorchFile, keys: list[object], offset: int) -> None:
    """Where each storage lies: an element count (int64) and its bytes, one storage after the other in the order of keys."""
    widths = _storage_widths(file.value)
    for key in keys:
        where = f"storage {key} in {region.where(offset)}"
        if offset + 8 > region.length:
            found = f"the end of the file at byte {region.length}"
            file.findings.append(Finding("file-too-short", where, "an element count", found))
            return
        (count,) = struct.unpack(">q" if file.is_big_endian else "<q", region.read(offset, 8))
        length = count * widths.get(str(key), 1)
        offset += 8
        if count < 0 or offset + length > region.length:
            expected, found = f"{length} bytes of data up to byte {offset + length}", f"{region.length} bytes in all"
            file.findings.append(Finding("file-too-short", where, expected, found))
            return
        file.storages[str(key)] = StoredStorage(region.offset + offset, length, region.encoding)
        offset += length
    if offset != region.length:
        found = f"{region.length - offset} more bytes"
        file.findings.append(Finding("trailing-bytes", region.where(offset), "the end of the last storage", found))


def _storage_widths(value: object) -> dict[str, int]:
    """Bytes per element of each storage that a value refers to, by its key."""
    from ckpttools.containers.trees import persistent_ids

    widths: dict[str, int] = {}
    for persistent in persistent_ids(value):
        pid = persistent.pid
        if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], Global):
            dtype = BY_STORAGE_CLASS.get(pid[1].name)
            widths[str(pid[2])] = dtype.item_bytes if dtype else 1
    return widths
