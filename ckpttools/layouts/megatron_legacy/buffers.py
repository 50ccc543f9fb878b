"""Names what the distributed optimizer stores as flat buffers: which stretch of a buffer is the state of which parameter.

A buffer has the parameters of one chunk and one dtype in the reverse order of the model, each beginning at a multiple of
64 elements (of 1 in releases before 2024), and begins anew after each bucket. The positions are not stored; they follow
from the shapes of the parameters and are taken only where the length of the buffer proves them. What lies between
parameters is undefined and belongs to no tensor. A replicated parameter's state is each tensor-parallel rank's own: the
ranks reduce gradients, not states, so copies that differ are a remark.

Source: NVIDIA/Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py (_ParamAndGradBuffer) and
optimizer/distrib_optimizer.py (get_parameter_state_dp_zero, load_parameter_state_from_dp_zero_legacy), core_v0.16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

from ckpttools.containers.parts import StoredTensor
from ckpttools.findings import Finding
from ckpttools.layouts.megatron_legacy.arguments import Arguments
from ckpttools.layouts.megatron_legacy.assembly import Assembly
from ckpttools.layouts.megatron_legacy.model import Parameter, PlacedChunk
from ckpttools.layouts.megatron_legacy.names import Parallel
from ckpttools.layouts.megatron_legacy.rules import TIED_OUTPUTS
from ckpttools.layouts.megatron_legacy.shards import Shard, TensorReader
from ckpttools.model import Path
from ckpttools.pickles.records import Global
from ckpttools.pickles.views import mapping_items, sequence_items

_MASTER_KEY = "param"
_ALIGNMENTS = (64, 1)
DEFAULT_BUCKET = 40_000_000
"""Elements after which a bucket ends, where nothing states it and there are not many data-parallel ranks."""


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """One buffer of a rank: per key (`param`, `exp_avg`, ...) the flat tensors of its buckets."""

    index: int
    dtypes: tuple[str, ...]
    """Of the parameters and of the gradients; of the gradients alone in releases before 2024."""
    tensors: Mapping[str, tuple[StoredTensor, ...]]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each bucket that is stored by itself."""
        return tuple(t.shape[0] for t in next(iter(self.tensors.values()), ()))


def add_buffers(
    shard: Shard,
    arguments: Arguments,
    expert_flags: Sequence[bool],
    chunks: Sequence[PlacedChunk],
    mesh: Parallel,
    assembly: Assembly,
    reader: TensorReader,
) -> None:
    """Add the flat state of one rank, by parameter where the lengths prove the positions, else as it is.

    Args:
        arguments: of the rank's model file.
        expert_flags: for each optimizer of a chain, whether it has the experts' parameters alone.
    """
    rank = shard.place.rank(mesh)
    value = shard.file.torch.value
    states = sequence_items(value)
    states = [value] if states is None else states
    for position, state in enumerate(states):
        is_expert = expert_flags[position] if position < len(expert_flags) and mesh.ep > 1 else None
        if is_expert is None and mesh.ep > 1:
            is_expert = False if len(states) == 1 else None
        groups = _groups(chunks, is_expert)
        for buffer in _buffers(shard, state, reader):
            parameters = _parameters_of(buffer, groups)
            starts = _starts(buffer, parameters, arguments)
            if starts is None:
                where = f"buffer {buffer.index} {list(buffer.dtypes)} in {shard.path.path}"
                expected = f"the {sum(_numel(p) for p in parameters)} elements of {len(parameters)} parameters, and gaps"
                assembly.findings.append(Finding("optimizer-unnamed", where, expected, f"{sum(buffer.lengths)} elements"))
                _add_flat(shard, position if len(states) > 1 else None, buffer, rank, assembly)
                continue
            for parameter, (bucket, start) in zip(parameters, starts, strict=True):
                _add_parameter(buffer, parameter, bucket, start, rank, assembly)


def _groups(chunks: Sequence[PlacedChunk], is_expert: bool | None) -> list[tuple[str, list[Parameter]]]:
    """(dtype, parameters in the order of the model) of each buffer: per chunk, then by dtype as it first appears."""
    found = []
    for chunk in chunks:
        by_dtype: dict[str, list[Parameter]] = {}
        for p in chunk.tensors:
            if p.is_parameter and (is_expert is None or p.is_expert == is_expert):
                by_dtype.setdefault(p.stored.dtype.name, []).append(p)
        found += list(by_dtype.items())
    return found


def _parameters_of(buffer: FlatBuffer, groups: Sequence[tuple[str, list[Parameter]]]) -> list[Parameter]:
    """The parameters of a buffer, in the order in which they lie in it."""
    if buffer.index < len(groups) and (len(buffer.dtypes) == 1 or groups[buffer.index][0] == buffer.dtypes[0]):
        return groups[buffer.index][1][::-1]
    return []


def _buffers(shard: Shard, state: object, reader: TensorReader) -> Iterator[FlatBuffer]:
    """The buffers of one optimizer."""
    for index, by_dtype in mapping_items(state) or []:
        if type(index) is not int:
            continue
        for dtypes, world in mapping_items(by_dtype) or []:
            names = sequence_items(dtypes) if not isinstance(dtypes, Global) else None
            tensors: dict[str, tuple[StoredTensor, ...]] = {}
            for key, value in mapping_items(world) or []:
                path: Path = (index, str(dtypes), str(key))
                records = sequence_items(value)
                stored = [reader.read(shard.file, path, r) for r in ([value] if records is None else records)]
                flat = tuple(t for t in stored if t is not None and len(t.shape) == 1)
                if flat and len(flat) == len(stored):
                    tensors[str(key)] = flat
            if len({tuple(t.shape for t in flat) for flat in tensors.values()}) == 1:
                yield FlatBuffer(index, tuple(_dtype(d) for d in (names or [dtypes])), tensors)


def _dtype(record: object) -> str:
    return record.name if isinstance(record, Global) else str(record)


def _numel(parameter: Parameter) -> int:
    return prod(parameter.stored.shape)


def _starts(buffer: FlatBuffer, parameters: Sequence[Parameter], arguments: Arguments) -> list[tuple[int, int]] | None:
    """(bucket, first element) of each parameter; None where the lengths do not prove them."""
    sizes = [_numel(p) for p in parameters]
    if not parameters:
        return None
    if len(buffer.lengths) > 1:
        return _in_buckets(sizes, buffer.lengths)
    own_bucket = [p.name.endswith(("embedding.word_embeddings.weight", *TIED_OUTPUTS)) for p in parameters]
    ranks = arguments.number("data_parallel_size") or 1
    stated = arguments.number("ddp_bucket_size")
    buckets = arguments.number("ddp_num_buckets")
    limits = {None, stated, max(DEFAULT_BUCKET, 1_000_000 * ranks), sum(sizes) // buckets if buckets else None}
    layouts = {
        tuple(lay_out(sizes, alignment, limit, own))
        for alignment in _ALIGNMENTS
        for limit in limits
        for own in ([False] * len(sizes), own_bucket)
    }
    length = buffer.lengths[0]
    exact = [layout for layout in layouts if layout[-1] == length]
    padded = [at for at in layouts if any(-(-at[-1] // n) * n == length for n in (ranks, lcm(ranks, 128)))]
    chosen = exact or padded
    return [(0, start) for start in chosen[0][:-1]] if len(chosen) == 1 else None


def lay_out(sizes: Sequence[int], alignment: int, bucket_limit: int | None, own_bucket: Sequence[bool]) -> list[int]:
    """The first element of each parameter in a buffer of which the ends of buckets were cut off, and its length. Pure.

    Args:
        sizes: elements of each parameter, in the order of the buffer.
        alignment: elements; each parameter begins at a multiple of it, from the start of its bucket.
        bucket_limit: elements after which a bucket ends; None for one bucket.
        own_bucket: whether a parameter has a bucket of its own (the embedding that two stages share).
    """
    starts = []
    bucket, at = 0, 0  # where the bucket began, and how far it is filled
    for size, is_alone in zip(sizes, own_bucket, strict=True):
        at = -(-at // alignment) * alignment
        if is_alone and at:
            bucket, at = bucket + at, 0
        starts.append(bucket + at)
        at += size
        if is_alone or (bucket_limit is not None and at >= bucket_limit):
            bucket, at = bucket + at, 0
    return [*starts, bucket + at]


def _in_buckets(sizes: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]] | None:
    """(bucket, first element) where each bucket is stored by itself and its parameters fill it exactly."""
    for alignment in _ALIGNMENTS:
        starts = []
        bucket, at = 0, 0
        for size in sizes:
            if bucket < len(lengths) and at == lengths[bucket]:
                bucket, at = bucket + 1, 0
            at = -(-at // alignment) * alignment
            starts.append((bucket, at))
            at += size
        if bucket == len(lengths) - 1 and at == lengths[-1] and all(b < len(lengths) for b, _ in starts):
            return starts
    return None


def _add_parameter(buffer: FlatBuffer, parameter: Parameter, bucket: int, start: int, rank: int, assembly: Assembly) -> None:
    for key, flat in buffer.tensors.items():
        what = "fp32" if key == _MASTER_KEY else key
        stored = flat[bucket].view(parameter.stored.shape, offset=start)
        for target in parameter.targets:
            rule = target.rule.describe(len(target.share.boxes) > 1) + f", from element {start} of a flat buffer"
            path: Path = ("optimizer", "state", target.name, what)
            assembly.add(path, target.of(stored), target.share, rank, rule, is_loose=True)


def _add_flat(shard: Shard, position: int | None, buffer: FlatBuffer, rank: int, assembly: Assembly) -> None:
    """A buffer whose positions are not proved, under the rank's directory."""
    chain: Path = () if position is None else (position,)
    for key, flat in buffer.tensors.items():
        for i, stored in enumerate(flat):
            last: Path = (i,) if len(flat) > 1 else ()
            path: Path = ("optimizer", shard.path.directory, *chain, buffer.index, "_".join(buffer.dtypes), key, *last)
            assembly.add_whole(path, stored, rank)
