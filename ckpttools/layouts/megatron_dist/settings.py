"""What megatron-core keeps beside the tensors: `metadata.json` and the state that all ranks share (`common.pt`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.containers.jsons import JsonError, parse_json, shown
from ckpttools.findings import Finding
from ckpttools.model import Commit, Mesh
from ckpttools.pickles.views import attributes, mapping_items, sequence_items
from ckpttools.storage.source import Listing, Source, read

METADATA_NAME, COMMON_NAME, INTEGRITY_NAME = "metadata.json", "common.pt", "integrity.json"
BACKENDS = ("torch_dist", "zarr")
_MAX_METADATA_BYTES = 1 << 20
_STEP_KEYS = ("iteration", "global_step", "step")


@dataclass(frozen=True, slots=True)
class Stated:
    """What `metadata.json` says."""

    backend: str
    commit: Commit
    findings: tuple[Finding, ...] = ()


def read_metadata(source: Source, listing: Listing, path: str) -> Stated:
    """`metadata.json`, which is written last, so that a save without one did not finish. Raises StorageError."""
    if path not in listing or not listing.files[path].is_regular:
        expected = "`metadata.json`, which is written last"
        return Stated("", Commit(False, "no metadata.json"), (Finding("not-committed", path, expected, "no such file"),))
    length, commit = listing.length_bytes(path), Commit(True, path)
    if length == 0:
        return Stated("", commit, (Finding("empty-file", path, "the JSON of megatron-core", "0 bytes"),))
    try:
        stated = parse_json(read(source, path, 0, length)) if length <= _MAX_METADATA_BYTES else None
    except JsonError as e:
        return Stated("", commit, (Finding("bad-json", path, "the JSON of megatron-core", e.message),))
    backend = stated.get("sharded_backend") if isinstance(stated, dict) else None
    if backend in BACKENDS:
        return Stated(str(backend), commit)
    found = shown(str(backend)) if isinstance(stated, dict) else f"{length} bytes that are no object"
    return Stated("", commit, (Finding("bad-container", path, f"sharded_backend {' or '.join(BACKENDS)}", found),))


def common_of_item(value: object) -> Mapping[object, object]:
    """The shared state in a ShardedObject, which is a list of one."""
    items = sequence_items(value)
    inner = items[0] if items and mapping_items(value) is None else value
    return dict(mapping_items(inner) or [])


def step_of(top: Mapping[object, object]) -> int | None:
    """The iteration that the shared state states."""
    candidates = [top.get(key) for key in _STEP_KEYS]
    candidates.append((attributes(top.get("args")) or {}).get("iteration"))
    return next((n for n in candidates if type(n) is int and n >= 0), None)


def mesh_of(top: Mapping[object, object]) -> Mesh:
    """The mesh that the arguments state: tp, pp, and of the others those above 1; its product is the number of ranks."""
    args = attributes(top.get("args")) or {}

    def size(name: str) -> int:
        value = args.get(f"{name}_parallel_size", args.get(f"{name}_model_parallel_size"))
        return value if type(value) is int and 0 < value < 1 << 31 else 0

    if not size("tensor"):
        return Mesh()
    experts, replicas = size("expert"), size("data")
    axes = [("tp", size("tensor")), ("pp", size("pipeline") or 1)]
    axes += [("cp", size("context"))] if size("context") > 1 else []
    if experts > 1 and replicas % experts == 0:
        axes.append(("ep", experts))
        replicas //= experts
    return Mesh((*axes, *([("dp", replicas)] if replicas else [])))
