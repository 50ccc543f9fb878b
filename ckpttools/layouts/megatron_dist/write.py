"""Arranges a torch_dist directory: DCP's files as the ranks of a mesh would write them, `common.pt`, and `metadata.json` last.

What lies in items of its own in the source (`<key>/shard_<place>_<grid>`) goes over byte for byte; all other objects are state
that the ranks share, and so are the tensors of a source's own `common.pt`.

Source: NVIDIA/Megatron-LM, megatron/core/dist_checkpointing/{core.py,strategies/common.py,strategies/torch.py}, core_v0.16.1.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttools.containers.dcp_arrange import Chunk, ObjectItem, arrange_directory
from ckpttools.containers.torch_archive import arrange_archive, nest, object_archive, tensor_record
from ckpttools.containers.trees import persistent_ids
from ckpttools.errors import ConversionError
from ckpttools.layouts.families import MODEL, OPTIMIZER
from ckpttools.layouts.megatron_dist.settings import COMMON_NAME, METADATA_NAME
from ckpttools.model import ArrangedFile, Arrangement, Literal, Mesh, ObjectEntry, Path, TensorSpec
from ckpttools.placement.dedup import owners
from ckpttools.placement.local import PlacedTensor

_SHARDED_OBJECT = re.compile(r".+/shard_\d+(?:\.\d+)*(?:_\d+(?:\.\d+)*)?")
_GROUP = re.compile(r"(?P<optimizer>.*?)optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\..+")
_COMMON = "common"


def arrange_ranks(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    *,
    objects: Sequence[ObjectEntry] = (),
    sequences: Mapping[Path, str],
    files_per_rank: int = 1,
) -> Arrangement:
    """A torch_dist directory as the ranks of a mesh would have written it together. Pure.

    Raises: ConversionError: for buckets of other model-parallel ranks than the mesh has, or a dtype that torch has no dense
        tensor of.
    """
    _require_groups([t.spec.name for t in tensors], mesh)
    shared = [t for t in tensors if t.family not in (MODEL, OPTIMIZER)]
    sharded = [t for t in tensors if t.family in (MODEL, OPTIMIZER)]
    owned = owners(sharded, mesh)
    rows = []
    for tensor in sharded:
        boxes = sorted(owned[tensor.spec.name].items(), key=lambda owned: owned[1])
        rows.append((tensor.spec, [Chunk(tensor.spec, box, rank) for box, rank in boxes]))
    items = [o for o in objects if _is_apart(o)]
    rest = [o for o in objects if not _is_apart(o)]
    *data, manifest = arrange_directory(rows, list(map(_item, items)), paths=None, files_per_rank=files_per_rank)
    stated = json.dumps(
        {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
    ).encode()
    record = ArrangedFile(METADATA_NAME, len(stated), literals=(Literal(0, stated),), is_commit_record=True)
    common = _arrange_common(shared, rest, sequences)
    return Arrangement("megatron_dist", (*data, common, replace(manifest, is_commit_record=False), record))


def refusals(tensors: Sequence[PlacedTensor]) -> dict[str, str]:
    """Name of a tensor -> why torch_dist has no place for it. Pure."""
    held = (MODEL, OPTIMIZER, _COMMON)
    return {t.spec.name: f"{t.family} of other ranks, which torch_dist keeps as objects" for t in tensors if t.family not in held}


def _is_apart(entry: ObjectEntry) -> bool:
    """Whether an object is an item of its own: by its name, or since only its bytes hold it (tensors lie inside of it)."""
    if _SHARDED_OBJECT.fullmatch(entry.name):
        return True
    is_file = entry.extent is not None and entry.extent.container == "torch" and entry.extent.encoding is None
    is_unread = entry.record is None and entry.kind != "NoneType"
    return is_file and (is_unread or next(persistent_ids(entry.record), None) is not None)


def _item(entry: ObjectEntry) -> ObjectItem:
    extent = entry.extent
    if extent is not None and extent.container == "torch" and extent.encoding is None:
        return ObjectItem(entry.name, source=(extent.file, extent.offset, extent.length))
    return ObjectItem(entry.name, data=object_archive(entry.record))


def _arrange_common(
    tensors: Sequence[PlacedTensor], objects: Sequence[ObjectEntry], sequences: Mapping[Path, str]
) -> ArrangedFile:
    """`common.pt`: one nested value of all that is not sharded."""
    storages: dict[str, TensorSpec] = {str(i): t.spec for i, t in enumerate(tensors)}
    entries: list[tuple[Path, object]] = [(_below(t.path), tensor_record(t.spec, str(i))) for i, t in enumerate(tensors)]
    entries += [(_below(o.path), o.record) for o in objects]
    inner = {_below(path): kind for path, kind in sequences.items()}
    return arrange_archive(COMMON_NAME, nest(entries, inner) if entries else {}, dict(storages))


def _below(path: Path) -> Path:
    """The keys in the file; those of a source's own `common.pt` stand below its family."""
    return path[1:] if path[:1] == (_COMMON,) else path


def _require_groups(names: Sequence[str], mesh: Mesh) -> None:
    """Buckets have no names of parameters, so they serve the model-parallel ranks that wrote them and no others."""
    groups: dict[str, set[int]] = defaultdict(set)
    for name in names:
        match = _GROUP.fullmatch(name)
        if match:
            groups[match["optimizer"]].add(int(match["group"]))
    sizes = dict(mesh.axes)
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1)
    for optimizer, found in groups.items():
        if len(found) not in (ranks, ranks * sizes.get("ep", 1)):
            raise ConversionError(
                f"optimizer state in buckets (dp_reshardable) of {len(found)} model-parallel ranks cannot be laid out for {mesh}",
                expected=f"tp x pp = {len(found)}{f' for {optimizer}' if optimizer else ''}",
                found=f"tp x pp = {ranks}",
                hints=["--weights-only leaves it behind", "Megatron itself can save it as fully_reshardable"],
            )
