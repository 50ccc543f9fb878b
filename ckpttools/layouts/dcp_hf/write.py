"""Writes the shards that DCP's Hugging Face writer leaves per rank, so that its reader puts the tensors together again.

Each box is in one file only: where several ranks hold it, the one that torch's planner would choose has it. Beside torch's
own metadata each header has a note of ours with the global shapes and the mesh, which the format itself states nowhere, so
that a missing last shard can be seen.

Source: pytorch/pytorch, torch/distributed/checkpoint/hf_storage.py and filesystem.py (the metadata), 2.13.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttools.containers.safetensors_ranks import arrange_rank_file, in_parts, unholdable
from ckpttools.model import Arrangement, Mesh, ObjectEntry, Path
from ckpttools.placement.dedup import owners
from ckpttools.placement.held import held_by, require_none
from ckpttools.placement.local import PlacedTensor

_VERSION = "1.0"


def arrange_ranks(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    *,
    objects: Sequence[ObjectEntry] = (),
    sequences: Mapping[Path, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    max_file_bytes: int | None = None,
) -> Arrangement:
    """`shard-<rank + 1>-model-<i>-of-<n>.safetensors`: per rank a file for each of the n that a consolidation would write. Pure.

    An alias is stored as a tensor of its own, because the reader asks for every name of a state dict.

    Args: max_file_bytes: of global tensors in each of the n files; None for n = 1.

    Raises: ConversionError: naming what safetensors cannot hold: objects, dtypes, fused cuts, names.
    """
    require_none(refusals(tensors, mesh, objects=objects), "DCP's safetensors shards")
    by_name = {t.spec.name: t for t in tensors}
    by_name |= {alias: by_name[kept] for alias, kept in (aliases or {}).items()}
    owner = owners([replace(t, spec=replace(t.spec, name=name)) for name, t in by_name.items()], mesh)
    groups = in_parts(by_name.items(), max_file_bytes)  # as a consolidation would divide them
    files = []
    for rank in range(mesh.ranks):
        for i, group in enumerate(groups, 1):
            shares = {name: one for name, tensor in group.items() for one in held_by([tensor], mesh, rank)}
            held = {name: one for name, one in shares.items() if owner[name].get(one.local.parts[0].box) == rank}
            info = {name: {"saved_offsets": one.local.parts[0].box.offsets} for name, one in held.items()}
            metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": _VERSION}
            path = f"shard-{rank + 1:05d}-model-{i:05d}-of-{len(groups):05d}.safetensors"
            files.append(arrange_rank_file(path, held, metadata, mesh, rank))
    return Arrangement("dcp_hf", tuple(files))


def refusals(
    tensors: Sequence[PlacedTensor], mesh: Mesh, *, objects: Sequence[ObjectEntry] = (), **_options: object
) -> dict[str, str]:
    """Per name of a tensor or object: why these files cannot hold it. Pure."""
    refused = unholdable(tensors, mesh, objects)
    for tensor in tensors:
        parts = max((len(h.local.parts) for r in range(mesh.ranks) for h in held_by([tensor], mesh, r)), default=1)
        if parts > 1:
            refused[tensor.spec.name] = f"a rank holds {parts} separate boxes of it, and a file has one box of a name"
    return refused
