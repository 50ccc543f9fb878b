"""Checkpoints in a directory of the snapshot: verl's `actor/`, SkyRL's `policy/`, OLMo-core's `model_and_optim/`.

Trainers put what the loop needs (data loader, trainer state) at the top of a snapshot, and each model with its optimizer into a
directory below. Such a directory is read as if it stood alone, and all that names a file gets its path in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckpttools.findings import Finding
from ckpttools.layouts.base import Contents, Part
from ckpttools.layouts.families import MODEL
from ckpttools.model import Extent, ObjectEntry, Piece, TensorEntry
from ckpttools.storage.source import Listing, Source

_MAX_DEPTH = 2
_MAX_DIRECTORIES = 8
_LOOSE = frozenset({"torch", "per_rank"})
"""Layouts that take a file of any name; what is in a directory is the model's only if the name says so."""
_NAMED_AS_MODEL = re.compile(r"(?:.*/)?(?:pytorch_)?(?:model|weights|consolidated)[^/]*", re.IGNORECASE)
_STEP = re.compile(r"(?:.*[-_])?(?:step|iter(?:ation)?|checkpoint|ckpt|epoch)s?[-_=]?\d.*|\d.*|release", re.IGNORECASE)
"""Names of snapshots: what holds those is a run directory, of which one is to be chosen."""
_ABSENT = frozenset({"missing-file", "missing-rank", "not-committed", "missing-index"})
"""Findings that name a file which is not listed."""

Sniff = Callable[[Source, Listing], list[Part]]


class InnerSource:
    """A directory of a source, as a source."""

    def __init__(self, source: Source, directory: str) -> None:
        self.location = f"{source.location.rstrip('/')}/{directory}"
        self._source = source
        self._directory = directory

    def listing(self) -> Listing:
        """The files below the directory, by their paths in it."""
        return inner_listing(self._source.listing(), self._directory)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """See `Source.read_into`."""
        self._source.read_into(f"{self._directory}/{file}", offset, buffer)


@dataclass(frozen=True)
class Inner:
    """A directory that holds a model, and its parts by their paths in it."""

    directory: str
    parts: tuple[Part, ...]
    source: InnerSource
    listing: Listing

    def family(self, part: Part, *, is_only: bool) -> str:
        """What the part's entries are called: as if it stood alone, or, beside others, by its directory."""
        if is_only:
            return part.family
        name = self.directory.replace("/", ".")
        return name if part.family == MODEL else f"{name}.{part.family}"


def inner_listing(listing: Listing, directory: str) -> Listing:
    """The files of a listing below a directory, by their paths in it. Pure."""
    prefix = f"{directory}/"
    files = [replace(f, path=f.path[len(prefix) :]) for f in listing if f.path.startswith(prefix)]
    return Listing(files, directories=tuple(d[len(prefix) :] for d in listing.directories if d.startswith(prefix)))


def find_inner(source: Source, listing: Listing, sniff: Sniff) -> list[Inner]:
    """The directories that hold a model, in order; none where there are too many for one snapshot."""
    if listing.is_one_file or listing.copies:
        return []
    found: list[Inner] = []
    waiting = [d for d in listing.subdirectories() if not _STEP.fullmatch(d)]
    while waiting:
        directory = waiting.pop(0)
        inner = InnerSource(source, directory)
        below = inner_listing(listing, directory)
        parts = tuple(sniff(inner, below))
        if any(_is_model(p) for p in parts):
            found.append(Inner(directory, parts, inner, below))
        elif directory.count("/") + 1 < _MAX_DEPTH:
            waiting += listing.subdirectories(directory)
        if len(found) > _MAX_DIRECTORIES:
            return []
    return found


def _is_model(part: Part) -> bool:
    return part.family == MODEL and (part.layout not in _LOOSE or _NAMED_AS_MODEL.fullmatch(part.files[0]) is not None)


def below(contents: Contents, listing: Listing, directory: str) -> Contents:
    """The contents of a directory as those of the snapshot that it is in: every file by its path there. Pure."""
    paths = {path: f"{directory}/{path}" for path in listing.files}
    record = contents.commit.record
    return replace(
        contents,
        tensors=tuple(_tensor(t, directory) for t in contents.tensors),
        objects=tuple(_object(o, directory) for o in contents.objects),
        files=tuple(replace(f, path=f"{directory}/{f.path}") for f in contents.files),
        findings=tuple(_finding(f, paths, directory) for f in contents.findings),
        commit=replace(contents.commit, record=f"{directory}/{record}" if record else ""),
        checksums=tuple(replace(c, file=f"{directory}/{c.file}") for c in contents.checksums),
    )


def _extent(extent: Extent, directory: str) -> Extent:
    return replace(extent, file=f"{directory}/{extent.file}")


def _pieces(pieces: Sequence[Piece], directory: str) -> tuple[Piece, ...]:
    return tuple(replace(p, extent=_extent(p.extent, directory)) for p in pieces)


def _tensor(entry: TensorEntry, directory: str) -> TensorEntry:
    return replace(
        entry,
        pieces=_pieces(entry.pieces, directory),
        replicas=_pieces(entry.replicas, directory),
        stale_copies=_pieces(entry.stale_copies, directory),
    )


def _object(entry: ObjectEntry, directory: str) -> ObjectEntry:
    return entry if entry.extent is None else replace(entry, extent=_extent(entry.extent, directory))


def _finding(finding: Finding, paths: dict[str, str], directory: str) -> Finding:
    where = re.sub(r"[^\s`]+", lambda m: paths.get(m[0], m[0]), finding.where)
    if where == finding.where and finding.code in _ABSENT and " " not in where:
        where = f"{directory}/{where}"
    return replace(finding, where=where)
