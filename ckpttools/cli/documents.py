"""The JSON documents that other programs rely on; `docs/reference/json.md` describes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ckpttools.findings import Finding
from ckpttools.model import Checkpoint, FileEntry, ObjectEntry, Piece, TensorEntry, TensorSpec, render_path
from ckpttools.operations.sealing import HashList
from ckpttools.operations.validate import Validation
from ckpttools.pickles.differences import ABSENT
from ckpttools.pickles.renditions import plain
from ckpttools.placement.rule_files import render_rules

if TYPE_CHECKING:
    from ckpttools.operations.conversion import Conversion
    from ckpttools.operations.diff import Diff, ObjectDiff, TensorDiff
    from ckpttools.operations.elementwise import Difference, Extreme, Number
    from ckpttools.operations.reshard import Resharding

_MAX_SHOWN = 200
"""Parts of a value that a document shows."""


def findings(found: Iterable[Finding]) -> list[dict[str, str]]:
    """One object per finding."""
    keys = ("code", "severity", "where", "expected", "found", "remedy")
    return [{key: getattr(f, key) for key in keys} for f in found]


def inspect(checkpoint: Checkpoint, *, has_tensors: bool, has_rules: bool = False) -> dict[str, Any]:
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
        "files": [_file(f) for f in checkpoint.files],
        **_roots(checkpoint),
    }
    if has_tensors:
        document["tensors"] = [_tensor(t) | ({"rule": t.rule} if has_rules and t.rule else {}) for t in checkpoint.tensors]
    document["objects"] = [_object(o) for o in checkpoint.objects]
    document["findings"] = findings(checkpoint.findings)
    return document


def _file(file: FileEntry) -> dict[str, Any]:
    described = {"path": file.path, "bytes": file.length_bytes, "role": file.role, "family": file.family}
    return described | ({"root": file.root} if file.root else {})


def _roots(checkpoint: Checkpoint) -> dict[str, Any]:
    """All locations of a snapshot that is spread over several."""
    return {"roots": list(checkpoint.roots)} if checkpoint.roots else {}


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
        **_roots(result.checkpoint),
    }


def conversion(result: Conversion) -> dict[str, Any]:
    """`ckpttools/consolidate/1`: what was written, or with --dry-run what would be."""
    document: dict[str, Any] = {
        "schema": "ckpttools/consolidate/1",
        "destination": result.destination,
        "is_written": result.seal is not None,
        "was_done": result.was_done,
        "fingerprint": _fingerprint(result),
        "aliases": result.selection.aliases,
        "left": list(result.selection.left),
    }
    document |= result.plan.describe()
    document |= _source_settled(result)
    document |= {"notes": list(result.notes)} if result.notes else {}
    for cast in document["casts"]:
        counts = result.casts.get(cast["tensor"])
        cast["lost"] = {f.name: getattr(counts, f.name) for f in fields(counts)} if counts is not None else None
    return document


def _source_settled(result: Conversion) -> dict[str, Any]:
    """The places of a source that is spread over several, and what was done about copies that differ."""
    return ({"roots": list(result.plan.roots)} if result.plan.roots else {}) | (
        {"replicas": dict(result.replicas)} if result.replicas else {}
    )


def _fingerprint(result: Conversion) -> str | None:
    """As `hash` gives it of the output; of what was written where that is not known."""
    return result.fingerprint or (result.seal.fingerprint if result.seal else None)


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
        "was_done": converted.was_done,
        "fingerprint": _fingerprint(converted),
        "aliases": converted.selection.aliases,
        "left": list(converted.selection.left),
        "dropped": list(result.dropped),
        "made_again": list(result.made_again),
        "rules": result.assignment.rules.name,
        "rules_toml": render_rules(result.assignment.rules),
        "placements": [
            {"tensor": a.tensor.spec.name, "placement": str(a.tensor.placement) or "replicated", "reason": a.reason}
            for a in result.assignment.assigned
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
        **_source_settled(converted),
        **({"notes": list(converted.notes)} if converted.notes else {}),
    }


def diff(result: Diff, *, has_same: bool) -> dict[str, Any]:
    """`ckpttools/diff/1`."""
    tolerance = result.tolerance
    return {
        "schema": "ckpttools/diff/1",
        "a": {"path": result.a.path, "layout": result.a.layout},
        "b": {"path": result.b.path, "layout": result.b.layout},
        "verdict": result.verdict,
        "rtol": tolerance.rtol if tolerance else None,
        "atol": tolerance.atol if tolerance else None,
        "bytes_read": result.bytes_read,
        "tensor_counts": result.tensor_counts,
        "object_counts": result.object_counts,
        "tensors": [_tensor_diff(t) for t in result.tensors if has_same or t.status != "same"],
        "objects": [_object_diff(o) for o in result.objects if has_same or o.status != "same"],
        "findings": findings(result.findings),
    }


def _tensor_diff(entry: TensorDiff) -> dict[str, Any]:
    document: dict[str, Any] = {"name": entry.name, "status": entry.status, "a": _spec(entry.a), "b": _spec(entry.b)}
    if entry.difference is not None:
        document["difference"] = _difference(entry.difference)
    return document


def _spec(spec: TensorSpec | None) -> dict[str, Any] | None:
    return None if spec is None else {"name": spec.name, "dtype": spec.dtype.name, "shape": list(spec.shape)}


def _difference(found: Difference) -> dict[str, Any]:
    return {
        "elements": found.elements,
        "bits": found.bits,
        "values": found.values,
        "beyond": found.beyond,
        "not_finite": found.not_finite,
        "zero_in_b": found.zero_in_b,
        "first": None if found.first is None else list(found.first),
        "max_abs": _extreme(found.max_abs),
        "max_rel": _extreme(found.max_rel),
    }


def _extreme(found: Extreme | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"difference": found.difference, "index": list(found.index), "a": _number(found.a), "b": _number(found.b)}


def _number(value: Number) -> object:
    if isinstance(value, complex):
        return [value.real, value.imag]
    return list(value) if isinstance(value, tuple) else value


def _object_diff(entry: ObjectDiff) -> dict[str, Any]:
    kinds = {side: None if o is None else o.kind for side, o in (("a", entry.a), ("b", entry.b))}
    return {"name": entry.name, "status": entry.status, **kinds, "places": list(places(entry))}


def places(entry: ObjectDiff) -> Iterator[dict[str, Any]]:
    """Where two objects differ: the dotted name of the place, and what is there on the sides that have it."""
    for place in entry.places:
        shown = {side: plain(v, max_nodes=_MAX_SHOWN) for side, v in (("a", place.a), ("b", place.b)) if v is not ABSENT}
        yield {"name": ".".join(filter(None, (entry.name, render_path(place.path)))), **shown}
