"""The zarr backend of megatron-core up to 0.12: a directory per tensor, one file per chunk, a torch file per object."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod

from ckpttools.containers.zarr_array import METADATA_NAME, read_array
from ckpttools.findings import Finding
from ckpttools.model import Extent, FileEntry, ObjectEntry, TensorEntry
from ckpttools.storage.source import ListedFile, Listing, Source

_SHARD = re.compile(r"(?P<key>.+)/shard_(?P<index>\d+(?:\.\d+)*)(?:_(?P<shape>\d+(?:\.\d+)*))?\.pt")
_MAX_NAMED = 16
_MAX_DIGITS = 12


@dataclass(slots=True)
class ZarrContents:
    """What the directories of a zarr checkpoint hold."""

    tensors: list[TensorEntry] = field(default_factory=list)
    objects: list[ObjectEntry] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def files_of(listing: Listing, directory: str) -> list[str]:
    """The arrays' and objects' files below a directory; empty when no array is there. Pure."""
    prefix = f"{directory}/" if directory else ""
    arrays = {p.rpartition("/")[0] for p in listing.files if p.startswith(prefix) and p.endswith(f"/{METADATA_NAME}")}
    arrays.discard(directory)
    if not arrays:
        return []
    return [p for p in listing.files if p.startswith(prefix) and (_array_of(p, arrays) or _SHARD.fullmatch(p[len(prefix) :]))]


def _array_of(path: str, arrays: set[str]) -> str:
    """The array that a file belongs to: its directory, or one above it where chunks are nested."""
    directory = path.rpartition("/")[0]
    while directory and directory not in arrays:
        directory = directory.rpartition("/")[0]
    return directory


def read_zarr(source: Source, listing: Listing, directory: str, paths: tuple[str, ...], family: str) -> ZarrContents:
    """Every array and object; what is wrong with them becomes findings. Raises StorageError."""
    prefix = f"{directory}/" if directory else ""
    arrays = {p.rpartition("/")[0] for p in paths if p.endswith(f"/{METADATA_NAME}")}
    contents, by_array = ZarrContents(), defaultdict[str, list[ListedFile]](list)
    shards: dict[str, list[re.Match[str]]] = defaultdict(list)
    for path in paths:
        shard = _SHARD.fullmatch(path[len(prefix) :])
        if shard is not None and path.rpartition("/")[0] not in arrays:
            shards[shard["key"]].append(shard)
        elif array := _array_of(path, arrays):
            by_array[array].append(listing.files[path])
    for array, files in sorted(by_array.items()):
        read = read_array(source, array, array[len(prefix) :], files, family)
        contents.tensors += [read.entry] if read.entry is not None else []
        contents.files += read.files
        contents.findings += read.findings
    for key, found in sorted(shards.items()):
        _take_objects(contents, listing, prefix, family, found)
        if not key.endswith("_extra_state"):  # a layer without any leaves its place empty
            contents.findings += islice(_absent(prefix, key, found), _MAX_NAMED)
    return contents


def _take_objects(contents: ZarrContents, listing: Listing, prefix: str, family: str, found: list[re.Match[str]]) -> None:
    for shard in found:
        path = prefix + shard[0]
        file, name = listing.files[path], shard[0].removesuffix(".pt")
        contents.files.append(FileEntry(path, file.length_bytes, "objects", family))
        if not file.is_regular or file.length_bytes == 0:
            contents.findings.append(Finding("empty-file", path, "a torch file", f"{file.length_bytes} bytes"))
            continue
        extent = Extent(path, 0, file.length_bytes, container="torch")
        contents.objects.append(ObjectEntry(name, (name,), "object", None, extent, family))


def _absent(prefix: str, key: str, found: list[re.Match[str]]) -> Iterator[Finding]:
    """Objects of a grid of which some are there and others are not."""
    shapes = {s["shape"] for s in found if s["shape"]}
    for text in sorted(s for s in shapes if max(map(len, s.split("."))) <= _MAX_DIGITS):
        shape = [int(n) for n in text.split(".")]
        there = {s["index"] for s in found if s["shape"] == text}
        for number in range(min(prod(shape), len(there) + _MAX_NAMED)):
            index, rest = [], number
            for n in reversed(shape):
                index.append(str(rest % n))
                rest //= n
            name = ".".join(reversed(index))
            if name not in there:
                where = f"{prefix}{key}/shard_{name}_{text}.pt"
                yield Finding("missing-file", where, f"each of {prod(shape)} objects", "no such file")
