"""DCP directories: `.metadata` (or one per rank) and `__<rank>_<n>.distcp`, in every dialect of torch's writers.

What the files hold is read by `containers.dcp_directory` and arranged by `containers.dcp_arrange`; here is where trainers put
such directories, and what torch's planner makes of a nested state dict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpttools.containers.dcp_arrange import Chunk, ObjectItem, arrange_directory
from ckpttools.containers.dcp_directory import find_directory, find_rank_directories, read_directory
from ckpttools.containers.torch_archive import object_archive
from ckpttools.containers.trees import persistent_ids
from ckpttools.errors import ConversionError
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.model import Arrangement, Mesh, ObjectEntry, Path, render_path
from ckpttools.placement.dedup import owners
from ckpttools.placement.local import PlacedTensor
from ckpttools.storage.source import Listing, Source

_FAMILIES = (
    (re.compile(r"(pytorch_)?model(_fsdp)?(_\d+)?|weights|model_weights"), "model"),
    (re.compile(r"optim(izer)?(_\d+)?"), "optimizer"),
)


class Dcp:
    """torch.distributed.checkpoint."""

    name = "dcp"
    looks_for = "`.metadata` or `__<rank>.metadata` beside `__<rank>_<n>.distcp`"

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """The root when it holds DCP files; else the directories of accelerate (`pytorch_model_fsdp_0`) or those of ranks."""
        root = self._part(listing, "", "model")
        if root is not None:
            return [root]
        parts = []
        for directory in listing.subdirectories():
            family = next((f for pattern, f in _FAMILIES if pattern.fullmatch(directory)), None)
            part = self._part(listing, directory, family) if family else None
            if part is not None:
                parts.append(part)
        ranks = find_rank_directories(listing) if not parts else None
        return [Part(self.name, "model", ranks.files, ranks.manifest)] if ranks is not None else parts

    def _part(self, listing: Listing, directory: str, family: str) -> Part | None:
        found = find_directory(listing, directory)
        return Part(self.name, family, found.files, found.manifest, directory) if found is not None else None

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """Everything `.metadata` states, held against the files that are there. Opens no item."""
        found = find_directory(listing, part.directory) or find_rank_directories(listing)
        if found is None:
            return Contents()
        read = read_directory(source, listing, found, part.family)
        return Contents(read.tensors, read.objects, read.files, read.findings, written_by=read.written_by, commit=read.commit)


LAYOUT = Dcp()


def arrange_ranks(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    *,
    objects: Sequence[ObjectEntry] = (),
    sequences: Mapping[Path, str],
    files_per_rank: int = 1,
) -> Arrangement:
    """A DCP directory as the ranks of a mesh would have written it together. Pure.

    Args:
        objects: an object that is a whole torch file in the source goes over byte for byte, others are pickled.
        sequences: path of each branch that is a `list` or a `tuple`; all others are dicts.

    Raises: ConversionError: for a dtype that torch has no dense tensor of, or two entries of one name.
    """
    owned = owners(tensors, mesh)
    rows = []
    for tensor in tensors:
        boxes = sorted(owned[tensor.spec.name].items(), key=_rank_of)
        rows.append((tensor.spec, [Chunk(tensor.spec, box, rank) for box, rank in boxes]))
    entries = [(t.spec.name, t.path) for t in tensors] + [(o.name, o.path) for o in objects]
    paths: dict[str, Path] = {}
    for name, path in entries:
        if name in paths:
            raise ConversionError(f"two entries have the name `{name}`, and DCP tells them apart by it alone")
        paths[name] = _keys(name, path, sequences)
    items = [_object_item(o) for o in objects]
    return Arrangement(LAYOUT.name, arrange_directory(rows, items, paths=paths, files_per_rank=files_per_rank))


def refusals(objects: Sequence[ObjectEntry]) -> dict[str, str]:
    """Name of an object -> why a DCP directory cannot hold it. Pure."""
    found = {}
    for entry in objects:
        if _is_item(entry):
            continue
        if entry.record is None and entry.kind != "NoneType":
            found[entry.name] = f"{entry.kind}: it was not read"
        elif next(persistent_ids(entry.record), None) is not None:
            found[entry.name] = f"{entry.kind}: tensors lie inside of it"
    return found


def _is_item(entry: ObjectEntry) -> bool:
    """Whether an object is a whole torch file in the source, which goes over as it is."""
    return entry.extent is not None and entry.extent.container == "torch" and entry.extent.encoding is None


def _rank_of(owned: tuple[object, int]) -> int:
    return owned[1]


def _keys(name: str, path: Path, sequences: Mapping[Path, str]) -> Path:
    """The path as torch's planner records it: places in lists are numbers, every key of a dict is text."""
    if render_path(path) != name:
        return (name,)
    return tuple(key if path[:i] in sequences else render_path((key,)) for i, key in enumerate(path))


def _object_item(entry: ObjectEntry) -> ObjectItem:
    extent = entry.extent
    if extent is not None and _is_item(entry):
        return ObjectItem(entry.name, source=(extent.file, extent.offset, extent.length))
    return ObjectItem(entry.name, data=object_archive(entry.record))
