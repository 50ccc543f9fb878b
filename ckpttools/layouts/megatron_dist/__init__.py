"""Distributed checkpoints of megatron-core: `metadata.json` beside DCP's files (`torch_dist`) or zarr's (up to 0.12).

torch_dist is DCP with more in it: state that all ranks share in `common.pt`, flattened optimizer state, buckets with gaps.
Layers and experts are stacked along leading dimensions, and stay so. NeMo 2 puts it all into `weights/`, with `context/`
beside it; NeMo 1 into `model_weights/`.

Source: NVIDIA/Megatron-LM, megatron/core/dist_checkpointing/, core_v0.9.0, core_v0.12.3, core_v0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpttools.containers.dcp_directory import DcpDirectory, find_directory, read_directory
from ckpttools.containers.items import open_item
from ckpttools.containers.torch_entries import open_rank_file, read_entries
from ckpttools.findings import Finding
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.layouts.families import EXTRA_STATE
from ckpttools.layouts.megatron_dist import settings, zarr
from ckpttools.layouts.megatron_dist.buckets import mask_gaps
from ckpttools.layouts.megatron_dist.flattened import true_shapes, unflatten
from ckpttools.model import FileEntry, ObjectEntry
from ckpttools.pickles.views import mapping_items
from ckpttools.storage.source import Listing, Source

_DIRECTORIES = ("", "weights", "model_weights")
_COMMON_FAMILY = "common"
_COMMON_KEY = re.compile(r"common_state/shard_[\d._]+")


class MegatronDist:
    """What megatron.core.dist_checkpointing.save wrote."""

    name = "megatron_dist"
    looks_for = "`metadata.json` of megatron-core (or `common.pt`) beside `.metadata` and `*.distcp`, or `<tensor>/.zarray`"

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """The root, or the directory in which NeMo puts the weights; `common.pt` is a part of its own."""
        for directory in _DIRECTORIES:
            prefix = f"{directory}/" if directory else ""
            beside = [prefix + n for n in (settings.METADATA_NAME, settings.INTEGRITY_NAME) if prefix + n in listing]
            common = prefix + settings.COMMON_NAME
            found, arrays = find_directory(listing, directory), zarr.files_of(listing, directory)
            is_stated = _is_ours(prefix + settings.METADATA_NAME, listing, peek)
            if not (is_stated or arrays or (found is not None and common in listing)):
                continue
            files = [*beside, *(found.files if found is not None else ()), *arrays]
            parts = [Part(self.name, "model", tuple(files), found.manifest if found else "", directory)] if files else []
            if common in listing:
                parts.append(Part(self.name, _COMMON_FAMILY, (common,), "", directory))
            return parts
        return []

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """The manifest's tensors and objects, or the state that all ranks share."""
        if part.family == _COMMON_FAMILY:
            return _read_common(source, listing, part.files[0])
        prefix = f"{part.directory}/" if part.directory else ""
        stated = settings.read_metadata(source, listing, prefix + settings.METADATA_NAME)
        found = find_directory(listing, part.directory)
        arrays = tuple(p for p in part.files if found is None or p not in found.files)
        if stated.backend == "zarr" or (found is None and not stated.backend):
            contents = _read_zarr(source, listing, part, arrays)
        else:
            contents = _read_torch_dist(source, listing, part, found or DcpDirectory(part.directory, (), ()))
        manifests = [p for p in part.files if p.rpartition("/")[2] in (settings.METADATA_NAME, settings.INTEGRITY_NAME)]
        files = [FileEntry(p, listing.length_bytes(p), "manifest", part.family) for p in manifests]
        known = {f.path for f in (*contents.files, *files)}
        files += [FileEntry(p, listing.length_bytes(p), "companion") for p in part.files if p not in known]
        return replace(
            contents,
            files=(*files, *contents.files),
            findings=(*stated.findings, *contents.findings),
            commit=stated.commit if contents.commit.is_committed else contents.commit,
        )


LAYOUT = MegatronDist()


def _is_ours(path: str, listing: Listing, peek: Peek) -> bool:
    return path in listing and listing.files[path].is_regular and b"_backend" in peek(path)


def _read_torch_dist(source: Source, listing: Listing, part: Part, found: DcpDirectory) -> Contents:
    read = read_directory(source, listing, found, part.family)
    tensors, mismatches = unflatten(read.tensors, true_shapes(read.others.get("mcore_data")))
    tensors, gaps = mask_gaps(tensors, found.manifest or part.directory)
    shared = _shared_item(source, read.objects)
    return Contents(
        tensors=tuple(tensors),
        objects=tuple(_with_family(o) for o in read.objects),
        files=read.files,
        findings=(*read.findings, *mismatches, *gaps),
        mesh=settings.mesh_of(shared),
        step=settings.step_of(shared),
        written_by=f"megatron-core torch_dist, {read.written_by}",
        commit=read.commit,
    )


def _read_zarr(source: Source, listing: Listing, part: Part, paths: tuple[str, ...]) -> Contents:
    read = zarr.read_zarr(source, listing, part.directory, paths, part.family)
    if not read.tensors and not read.findings:
        where = f"{part.directory}/" if part.directory else ""
        read.findings.append(Finding("missing-file", f"{where}*/.zarray", "a directory for each tensor", "none"))
    return Contents(
        tensors=tuple(read.tensors),
        objects=tuple(_with_family(o) for o in read.objects),
        files=tuple(read.files),
        findings=tuple(read.findings),
        written_by="megatron-core zarr",
    )


def _with_family(entry: ObjectEntry) -> ObjectEntry:
    """TransformerEngine's scales are no weights, though they may be tensors."""
    return replace(entry, family=EXTRA_STATE) if "._extra_state/" in entry.name else entry


def _shared_item(source: Source, objects: Iterable[ObjectEntry]) -> Mapping[object, object]:
    """The shared state of megatron-core from 0.19 on, which is an item like any other."""
    for entry in objects:
        if _COMMON_KEY.fullmatch(entry.name) and entry.extent is not None:
            return settings.common_of_item(open_item(source, entry.extent).value)
    return {}


def _read_common(source: Source, listing: Listing, path: str) -> Contents:
    file = open_rank_file(source, path, listing.length_bytes(path))
    entries = read_entries([file])
    top = dict(mapping_items(file.torch.value) or [])
    return Contents(
        tensors=tuple(entries.tensors),
        objects=tuple(entries.objects),
        files=(FileEntry(path, listing.length_bytes(path), "objects", _COMMON_FAMILY),),
        findings=tuple(entries.findings),
        mesh=settings.mesh_of(top),
        step=settings.step_of(top),
        written_by="megatron-core",
        checksums=tuple(entries.checksums),
        trees=entries.trees,
    )
