"""Reads DCP's `.metadata`: a pickle of `torch.distributed.checkpoint.metadata.Metadata`, into plain rows.

Source: pytorch/pytorch, torch/distributed/checkpoint/metadata.py and filesystem.py, v2.13.0; before 2.3 the classes of
TensorProperties lie in torch.distributed._shard.sharded_tensor.metadata, before 2.0 all lie in _shard.checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpttools.containers.strangers import HEAD_BYTES, tell
from ckpttools.containers.torch_file import unsafe_globals
from ckpttools.containers.torch_values import MAX_DIMENSION
from ckpttools.dtypes import DType, parse_dtype
from ckpttools.findings import Finding
from ckpttools.model import Box, Path
from ckpttools.pickles.reader import PickleError, read_pickle
from ckpttools.pickles.records import Global, Object
from ckpttools.pickles.views import attributes, mapping_items, outline, sequence_items

_MEMBERS = frozenset({"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "all_local_plans"})
"""What torch itself puts into a Metadata; megatron-core leaves its plans in it too, which nobody reads."""


@dataclass(frozen=True, slots=True)
class Item:
    """Where one stored box or object lies, as the manifest says."""

    file: str
    """Relative to the directory of the manifest; untrusted."""
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(slots=True)
class ManifestTensor:
    """A tensor's row."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[Box]


@dataclass(slots=True)
class Manifest:
    """What one `.metadata` states."""

    tensors: dict[str, ManifestTensor] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    items: dict[tuple[str, tuple[int, ...] | None], Item] = field(default_factory=dict)
    """By name and chunk offsets; None for objects."""
    paths: dict[str, Path] = field(default_factory=dict)
    """The nested keys of a flat name, where the planner recorded them."""
    version: str = ""
    others: dict[str, object] = field(default_factory=dict)
    """Further members of the pickled Metadata, as records."""
    findings: list[Finding] = field(default_factory=list)
    is_readable: bool = True


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The rows of a `.metadata`; what does not read is a finding, and the other rows are still there. Pure."""
    manifest = Manifest()
    try:
        pickled = read_pickle(data)
    except PickleError as e:
        stranger = tell(data[:HEAD_BYTES])
        what, remedy = (stranger.what, stranger.remedy) if stranger else (str(e), "")
        manifest.findings.append(Finding(e.code, where, "a pickled Metadata", what, remedy))
        manifest.is_readable = False
        return manifest
    manifest.findings += unsafe_globals(pickled, where)
    members = attributes(pickled.value) if isinstance(pickled.value, Object) else None
    if members is None or "state_dict_metadata" not in members or "storage_data" not in members:
        found = f"an object of {pickled.value.type_name}" if isinstance(pickled.value, Object) else type(pickled.value).__name__
        manifest.findings.append(Finding("bad-container", where, "Metadata with state_dict_metadata and storage_data", found))
        manifest.is_readable = False
        return manifest
    if isinstance(pickled.value, Object):
        pickled.value.state = None  # what a member states is let go of as it is taken
    manifest.version = str(members.get("version") or "")
    manifest.others = {k: v for k, v in members.items() if k not in _MEMBERS}
    for name, row in _emptied(members["state_dict_metadata"]):
        _take_row(manifest, name, row, where)
    for index, info in _emptied(members["storage_data"]):
        _take_item(manifest, index, info, where)
    for name, keys in _emptied(members.get("planner_data") or {}):
        items = sequence_items(keys)
        if isinstance(name, str) and items and all(isinstance(k, (str, int)) for k in items):
            manifest.paths[name] = tuple(k for k in items if isinstance(k, (str, int)))
    return manifest


def _emptied(mapping: object) -> Iterator[tuple[object, object]]:
    """The keys and values of a mapping, which is empty afterwards: a million records go as the rows that they state come."""
    items = mapping_items(mapping) or []
    if isinstance(mapping, dict):
        mapping.clear()
    items.reverse()
    while items:
        yield items.pop()


def _take_row(manifest: Manifest, name: object, row: object, where: str) -> None:
    """One value of state_dict_metadata: a tensor with its chunks, or an object."""
    if not isinstance(name, str) or not isinstance(row, Object):
        manifest.findings.append(Finding("bad-container", where, "rows by name", f"{outline(name)}"))
        return
    members = row.state if isinstance(row.state, dict) else {}
    if "chunks" not in members:
        manifest.objects.append(name)
        return
    try:
        dtype = _dtype(members["properties"])
        chunks = [_box(c) for c in members["chunks"]]
        manifest.tensors[name] = ManifestTensor(dtype, _size(members["size"]), chunks)
    except ValueError as e:
        manifest.findings.append(Finding("unknown-dtype", f"{name} in {where}", "a dtype of torch", str(e)))
    except (TypeError, KeyError, IndexError, AttributeError) as e:
        manifest.findings.append(Finding("bad-container", f"{name} in {where}", "properties, size and chunks", str(e)))


def _take_item(manifest: Manifest, index: object, info: object, where: str) -> None:
    """One entry of storage_data: MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset, length)."""
    try:
        key, place = index.state, info.state  # type: ignore[attr-defined]  # anything else is caught below
        offsets = None if key.get("offset") is None else _size(key["offset"])
        file, offset, length = place["relative_path"], place["offset"], place["length"]
        _require_place(key["fqn"], file, offset, length)
        transforms = tuple(str(t) for t in place.get("transform_descriptors") or ())
        manifest.items[key["fqn"], offsets] = Item(file, offset, length, transforms)
    except (TypeError, KeyError, AttributeError) as e:
        manifest.findings.append(Finding("bad-container", where, "storage_data by MetadataIndex", f"an entry without {e}"))


def _require_place(name: object, file: object, offset: object, length: object) -> None:
    if not (isinstance(name, str) and isinstance(file, str) and type(offset) is int and type(length) is int):
        raise TypeError("a member of another type")
    if offset < 0 or length < 0:
        raise TypeError(f"negative offset or length: {offset}, {length}")


def _dtype(properties: object) -> DType:
    """TensorProperties' state is a tuple that starts with the dtype; very old ones have a dict."""
    state = properties.state  # type: ignore[attr-defined]  # anything else is caught by the caller
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(dtype, Global):
        raise TypeError(f"no dtype but {outline(dtype)}")
    return parse_dtype(dtype.name)


def _box(chunk: object) -> Box:
    state = chunk.state  # type: ignore[attr-defined]  # anything else is caught by the caller
    return Box(_size(state["offsets"]), _size(state["sizes"]))


def _size(value: object) -> tuple[int, ...]:
    """A torch.Size: an object whose one argument is the tuple; called for every chunk, so the common case comes first."""
    items = value.args[0] if isinstance(value, Object) and value.args else sequence_items(value)
    if not isinstance(items, (tuple, list)):
        if isinstance(value, Object) and not value.args:
            return ()
        raise TypeError(f"no size but {outline(value)}")
    for n in items:
        if type(n) is not int or not 0 <= n <= MAX_DIMENSION:
            raise TypeError(f"no size but {outline(items)}")
    return tuple(items)
