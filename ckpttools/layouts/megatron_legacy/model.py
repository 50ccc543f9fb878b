"""Adds the model's tensors and objects of every rank to the assembly, and remembers the parameters in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.containers.parts import StoredTensor
from ckpttools.findings import Finding
from ckpttools.layouts.megatron_legacy.assembly import Assembly
from ckpttools.layouts.megatron_legacy.names import Parallel
from ckpttools.layouts.megatron_legacy.numbering import Numbering
from ckpttools.layouts.megatron_legacy.resolution import Resolver, Target, UnresolvedError
from ckpttools.layouts.megatron_legacy.shards import Chunk, Shard

_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A stored tensor of a chunk, and the whole ones that it is a share of."""

    name: str
    """As stored, with the chunk's layer numbers."""
    stored: StoredTensor
    targets: tuple[Target, ...]
    is_parameter: bool
    """Whether it is trained; a buffer has no optimizer state."""
    is_expert: bool


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """The tensors of one chunk, in the order of the file (which is that of the module's parameters)."""

    chunk: Chunk
    tensors: tuple[Parameter, ...]


def add_model(shards: Sequence[Shard], numbering: Numbering, mesh: Parallel, assembly: Assembly) -> dict[int, list[PlacedChunk]]:
    """Add every rank's model. Returns the placed chunks of each rank, in order, by the rank's number."""
    placed: dict[int, list[PlacedChunk]] = {}
    pairs = [(shard, chunk) for shard in shards for chunk in shard.chunks]
    for shard, chunk in sorted(pairs, key=lambda pair: (pair[1].number, pair[1].place)):  # as layers are numbered
        rank = shard.place.rank(mesh)
        resolver = Resolver(chunk, numbering, mesh, shard.arguments, shard.version)
        found = [
            parameter
            for name, stored in chunk.tensors.items()
            if (parameter := _add_tensor(name, stored, resolver, rank, assembly)) is not None
        ]
        placed.setdefault(rank, []).append(PlacedChunk(chunk, tuple(found)))
        for name, record in chunk.objects.items():
            assembly.add_object((resolver.rename(name),), record)
    return placed


def _add_tensor(name: str, stored: StoredTensor, resolver: Resolver, rank: int, assembly: Assembly) -> Parameter | None:
    """Add a tensor of a chunk; None for what is no tensor of the model, or cannot be placed."""
    if name.endswith(_EXTRA_STATE):  # bytes that Transformer Engine keeps for itself, in releases that pack them as a tensor
        kind = f"tensor {stored.dtype} {list(stored.shape)}"
        assembly.add_object((resolver.rename(name),), None, extent=stored.extent, kind=kind)
        return None
    try:
        targets = tuple(resolver.resolve(name, stored))
        for target in targets:
            assembly.add((target.name,), target.of(stored), target.share, rank, _describe(target, name))
    except UnresolvedError as e:
        where = f"{name} in {stored.extent.file}"
        assembly.findings.append(Finding(e.code, where, e.expected, e.found))
        assembly.add_whole((resolver.rename(name),), stored, rank, "none")
        return None
    except ValueError as e:
        assembly.findings.append(Finding("rank-mismatch", f"{name} in {stored.extent.file}", "a tensor of its rule", str(e)))
        return None
    is_expert = ".experts." in name or ".local_experts." in name
    return Parameter(name, stored, targets, targets[0].rule.is_parameter, is_expert)


def _describe(target: Target, name: str) -> str:
    """The rule for people, and the stored name's last part where it is another."""
    tail = name.rpartition("layers.")[2].partition(".")[2] or name
    renamed = "" if target.name.endswith(tail) else f", stored as {tail}"
    return target.rule.describe(len(target.share.boxes) > 1) + renamed
