"""A set of safetensors files, with or without an index, as tensors: one piece each, where the header says it lies.

Several layouts hold such sets. Read `read_set` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpttools.containers.safetensors_file import SafetensorsEntry, SafetensorsHeader, read_header
from ckpttools.containers.shard_index import ShardIndex, check_index, check_references, check_unique, read_index
from ckpttools.findings import Finding
from ckpttools.model import Box, Commit, Extent, FileEntry, Piece, TensorEntry, TensorSpec
from ckpttools.storage.source import Listing, Source, is_url

_URL_JOBS = 8


@dataclass(frozen=True)
class SafetensorsSet:
    """What the files of one set hold."""

    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    commit: Commit
    findings: tuple[Finding, ...]
    written_by: str = ""


def read_headers(source: Source, listing: Listing, files: Sequence[str]) -> dict[str, SafetensorsHeader]:
    """The header of each of the listed `files`, in their order. Raises StorageError when the storage breaks."""

    def header(file: str) -> SafetensorsHeader:
        if not listing.files[file].is_regular:
            return SafetensorsHeader(file, findings=(Finding("special-file", file, "a regular file", listing.files[file].kind),))
        return read_header(source, file, 0, listing.length_bytes(file))

    if len(files) > 1 and is_url(source.location):
        with ThreadPoolExecutor(min(_URL_JOBS, len(files))) as pool:
            return dict(zip(files, pool.map(header, files), strict=True))
    return {file: header(file) for file in files}


def read_set(
    source: Source,
    listing: Listing,
    files: Sequence[str],
    *,
    index_file: str = "",
    others: Sequence[str] = (),
    family: str = "model",
) -> SafetensorsSet:
    """The tensors of a set.

    With an index, the files are those that it names; without one (or with one that does not parse) they are `files`.

    Args:
        files: listed data files that by their names belong to the set
        others: further listed data files that the index may name
    Raises: StorageError: when the storage breaks.
    """
    index = read_index(source, listing, index_file) if index_file else None
    findings = list(index.findings) if index else []
    if index is not None and index.is_parsed:
        candidates = list(dict.fromkeys((*files, *others)))
        findings += check_references(index, listing, candidates)
        data = [file for file in index.files if file in listing]
        unreferenced = [file for file in candidates if file not in data]
    else:
        data, unreferenced = list(files), list(others)
    headers = read_headers(source, listing, data)
    findings += [finding for header in headers.values() for finding in header.findings]
    # a file whose header does not read has a finding, and needs none for each of its tensors
    names = {
        file: {e.name: e for e in header.entries} for file, header in headers.items() if header.entries or not header.findings
    }
    if index is not None and index.is_parsed:
        findings += check_index(
            index, names, total_bytes=_total_bytes(headers.values(), is_complete=len(data) == len(index.files))
        )
    else:
        findings += check_unique(names)
    return SafetensorsSet(
        tuple(_tensors(headers.values(), index.weight_map if index else {}, family)),
        _file_entries(listing, data, unreferenced, index_file, family),
        _commit(index, listing, data),
        tuple(findings),
        _written_by(index, headers.values()),
    )


def piece_of(entry: SafetensorsEntry, file: str, *, box: Box | None = None, rank: int | None = None) -> Piece:
    """The stretch of a file that a header entry describes, as the box that it holds (by default the whole tensor). Pure."""
    whole = Box((0,) * len(entry.shape), entry.shape)
    return Piece(box or whole, Extent(file, entry.offset, entry.length), rank)


def _tensors(headers: Iterable[SafetensorsHeader], weight_map: Mapping[str, str], family: str) -> list[TensorEntry]:
    """One tensor per name, from the file that the index says or else from the first; without a piece if it is damaged."""
    chosen: dict[str, tuple[str, SafetensorsEntry]] = {}
    for header in headers:
        for entry in header.entries:
            if entry.name not in chosen or weight_map.get(entry.name) == header.file:
                chosen[entry.name] = (header.file, entry)
    return [
        TensorEntry(
            TensorSpec(name, entry.dtype, entry.shape),
            (name,),
            (piece_of(entry, file),) if entry.is_readable else (),
            family=family,
        )
        for name, (file, entry) in chosen.items()
    ]


def _total_bytes(headers: Iterable[SafetensorsHeader], *, is_complete: bool) -> tuple[int, ...]:
    """The total that a right index states; nothing to compare with when headers are damaged or files are missing."""
    headers = list(headers)
    if not is_complete or any(header.findings for header in headers):
        return ()
    return (sum(entry.length for header in headers for entry in header.entries),)


def _file_entries(
    listing: Listing, data: Iterable[str], unreferenced: Iterable[str], index_file: str, family: str
) -> tuple[FileEntry, ...]:
    roles = {**dict.fromkeys(unreferenced, "unreferenced"), **dict.fromkeys(data, "data")}
    if index_file:
        roles[index_file] = "manifest"
    return tuple(FileEntry(path, listing.length_bytes(path), roles[path], family) for path in sorted(roles))


def _commit(index: ShardIndex | None, listing: Listing, data: Sequence[str]) -> Commit:
    """An index is written last; a lone file is its own record."""
    if index is None:
        return Commit(bool(data), data[0] if len(data) == 1 else "")
    missing = next((file for file in index.files if file not in listing), "")
    return Commit(index.is_parsed and not missing, missing or index.file)


def _written_by(index: ShardIndex | None, headers: Iterable[SafetensorsHeader]) -> str:
    """The writer, as far as it left a trace: mergekit names itself, DCP its version, others at most the framework."""
    mergekit = index.metadata.get("mergekit_version") if index else None
    if isinstance(mergekit, str):
        return f"mergekit {mergekit}"
    metadata = next((header.metadata for header in headers if header.metadata), {})
    if "DCP_VERSION" in metadata:
        return f"DCP HuggingFaceStorageWriter {metadata['DCP_VERSION']}"
    return f"safetensors (format {metadata['format']})" if metadata.get("format") else ""
