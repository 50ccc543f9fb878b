"""The JSON documents that other programs rely on; `docs/reference/json.md` describes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ckpttools.findings import Finding
from ckpttools.model import Checkpoint, ObjectEntry, Piece, TensorEntry
from ckpttools.operations.sealing import HashList
from ckpttools.operations.validate import Validation

if TYPE_CHECKING:
    from ckpttools.operations.conversion import Conversion
    from ckpttools.operations.reshard import Resharding


def findings(found: Iterable[Finding]) -> list[dict[str, str]]:
    """One object per finding."""
    keys = ("code", "severity", "where", "expected", "found", "remedy")
    return [{key: getattr(f, key) for key in keys} for f in found]


def inspect(checkpoint: Checkpoint, *, has_tensors: bool) -> dict[str, Any]:
    """`ckpttools/inspect/1`."""
    document: dict[str, Any] = {
        "schema": "ckpttools/inspect/1",
        "path": checkpoint.path,
        "layout": checkpoint.layout,
        "written_by": checkpoint.written_by,
        "step": checkpoint.step,
        "committed": checkpoint.commit.is_committed,
        "mesh": dict(checkpoint.mesh.axes),
        "bytes": sum(f.length_bytes for f in checkpoint.files),
        "tensor_count": len(checkpoint.tensors),
        "tensor_bytes": checkpoint.tensor_bytes,
        "aliases": [list(group) for group in checkpoint.aliases],
        "files": [{"path": f.path, "bytes": f.length_bytes, "role": f.role, "family": f.family} for f in checkpoint.files],
    }
    if has_tensors:
        document["tensors"] = [_tensor(t) for t in checkpoint.tensors]
    document["objects"] = [_object(o) for o in checkpoint.objects]
    document["findings"] = findings(checkpoint.findings)
    return document


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "path": [_key(k) for k in entry.path],
        "family": entry.family,
        "dtype": entry.spec.dtype.name,
        "shape": list(entry.spec.shape),
        "bytes": entry.spec.length_bytes,
        "pieces": [_piece(p) for p in entry.pieces],
        "replicas": [_piece(p) for p in entry.replicas],
        **({"part_of": entry.part_of} if entry.part_of else {}),
    }


def _key(key: object) -> object:
    """A typed key; what JSON has no type for is text."""
    return key if key is None or isinstance(key, (bool, int, str)) else str(key)


def _piece(piece: Piece) -> dict[str, Any]:
    """Where a piece lies; fields that say "nothing special" are left out."""
    extent = piece.extent
    place: dict[str, Any] = {"file": extent.file, "offset": extent.offset, "length": extent.length}
    if extent.encoding is not None:
        inner = {"codec": extent.encoding.codec, "offset": extent.encoding.offset, "length": extent.encoding.length}
        place["encoding"] = inner
    if extent.strides is not None:
        place["strides"] = list(extent.strides)
    if extent.transforms:
        place["transforms"] = list(extent.transforms)
    if piece.rank is not None:
        place["rank"] = piece.rank
    place["box"] = {"offsets": list(piece.box.offsets), "sizes": list(piece.box.sizes)}
    return place


def _object(entry: ObjectEntry) -> dict[str, Any]:
    return {"name": entry.name, "kind": entry.kind, "family": entry.family}


def hash_list(hashes: HashList) -> dict[str, Any]:
    """`ckpttools/hash/1`."""
    return {
        "schema": "ckpttools/hash/1",
        "algorithm": hashes.algorithm,
        "fingerprint": hashes.fingerprint,
        "tensors": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "digest": t.digest} for t in hashes.tensors],
    }


def validate(result: Validation) -> dict[str, Any]:
    """`ckpttools/validate/1`."""
    return {
        "schema": "ckpttools/validate/1",
        "path": result.checkpoint.path,
        "layout": result.checkpoint.layout,
        "verdict": result.verdict,
        "depth": result.depth,
        "sealed": result.is_sealed,
        "tensors": len(result.checkpoint.tensors),
        "tensors_read": result.tensors_read,
        "files": len(result.checkpoint.files),
        "bytes_read": result.bytes_read,
        "checksums": result.checksums,
        "findings": findings(result.findings),
    }


def conversion(result: Conversion) -> dict[str, Any]:
    """`ckpttools/consolidate/1`: what was written, or with --dry-run what would be."""
    document: dict[str, Any] = {
        "schema": "ckpttools/consolidate/1",
        "destination": result.destination,
        "is_written": result.seal is not None,
        "fingerprint": result.seal.fingerprint if result.seal else None,
        "aliases": result.selection.aliases,
        "left": list(result.selection.left),
    }
    document |= result.plan.describe()
    for cast in document["casts"]:
        counts = result.casts.get(cast["tensor"])
        cast["lost"] = {f.name: getattr(counts, f.name) for f in fields(counts)} if counts is not None else None
    return document


def resharding(result: Resharding) -> dict[str, Any]:
    """`ckpttools/reshard/1`: what was written, or with --dry-run what would be; how it is placed and what each rank draws on."""
    converted = result.conversion
    described = converted.plan.describe()
    del described["casts"]
    return {
        "schema": "ckpttools/reshard/1",
        "destination": converted.destination,
        "target": result.target,
        "mesh": dict(result.mesh.axes),
        "is_written": converted.seal is not None,
        "fingerprint": converted.seal.fingerprint if converted.seal else None,
        "aliases": converted.selection.aliases,
        "left": list(converted.selection.left),
        "dropped": list(result.dropped),
        "rules": result.placings.rules,
        "placements": [
            {"tensor": t.spec.name, "placement": str(t.placement) or "replicated", "reason": reason}
            for t, reason in zip(result.placings.tensors, result.placings.reasons, strict=True)
        ],
        "ranks": [
            {
                "rank": draw.rank,
                "at": draw.at,
                "bytes": draw.length_bytes,
                "sources": [{"file": file, "bytes": count} for file, count in sorted(draw.sources.items())],
            }
            for draw in result.draws()
        ],
        **described,
    }
