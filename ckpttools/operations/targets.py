"""What `reshard` can write: each target's name, what it holds, and the layout that arranges it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.layouts import dcp
from ckpttools.layouts.dcp_hf import write as write_shards
from ckpttools.layouts.megatron_dist import write as write_torch_dist
from ckpttools.model import Arrangement, Mesh, ObjectEntry, Path
from ckpttools.placement.local import PlacedTensor


@dataclass(frozen=True)
class Request:
    """All that a layout may need to arrange files for the ranks of a mesh."""

    tensors: Sequence[PlacedTensor]
    mesh: Mesh
    objects: Sequence[ObjectEntry]
    sequences: Mapping[Path, str]
    """Path of each branch of nested values that is a `list` or a `tuple`."""
    aliases: Mapping[str, str]
    """Output name that is not written -> the output name whose tensor it is."""
    files_per_rank: int = 1
    max_part_bytes: int | None = None


@dataclass(frozen=True)
class Target:
    """One way to lay a checkpoint out for the ranks of a mesh."""

    name: str
    """As `--to` has it."""
    summary: str
    arrange: Callable[[Request], Arrangement]
    holds_objects: bool
    """Whether it has a place for what is no tensor."""
    holds_state: bool
    """Whether it has a place for optimizer state and other families beside the model's tensors."""
    needs_even: bool = False
    """Whether every rank's share must have the same size: the files do not say which box they hold."""
    states_boxes: bool = True
    """Whether what is written says which box of which tensor it is, so that it reads back as one checkpoint."""
    shares_storage: bool = False
    """Whether tied tensors stay one stored tensor under several names; otherwise each name is written."""
    holds_whole_items: bool = False
    """Whether an object that is a torch file of its own in the source goes over byte for byte."""


def _dcp(request: Request) -> Arrangement:
    return dcp.arrange_ranks(
        request.tensors,
        request.mesh,
        objects=request.objects,
        sequences=request.sequences,
        files_per_rank=request.files_per_rank,
    )


def _safetensors(request: Request) -> Arrangement:
    return write_shards.arrange_ranks(
        request.tensors,
        request.mesh,
        objects=request.objects,
        sequences=request.sequences,
        aliases=request.aliases,
        max_file_bytes=request.max_part_bytes,
    )


def _megatron_dist(request: Request) -> Arrangement:
    return write_torch_dist.arrange_ranks(
        request.tensors,
        request.mesh,
        objects=request.objects,
        sequences=request.sequences,
        files_per_rank=request.files_per_rank,
    )


TARGETS = (
    Target(
        "dcp",
        "torch.distributed.checkpoint: `.metadata` and `__<rank>_<n>.distcp`",
        _dcp,
        holds_objects=True,
        holds_state=True,
        holds_whole_items=True,
    ),
    Target(
        "safetensors",
        "what DCP's Hugging Face writer leaves per rank: `shard-<rank + 1>-model-<i>-of-<n>.safetensors`",
        _safetensors,
        holds_objects=False,
        holds_state=False,
    ),
    Target(
        "megatron-dist",
        "Megatron-core's torch_dist: DCP's files, `common.pt` and `metadata.json`",
        _megatron_dist,
        holds_objects=True,
        holds_state=True,
        holds_whole_items=True,
    ),
)
"""In the order in which help lists them."""

BY_NAME = {target.name: target for target in TARGETS}
