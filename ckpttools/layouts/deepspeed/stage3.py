"""ZeRO 3: every parameter is cut on its own into equal parts, padded at its end, and the parts of a rank follow one another.

Rank r of n holds the elements [r * part, (r + 1) * part) of a parameter, with part = ceil(numel / n). The flat groups of
a rank (one per sub-group) are one stretch: a parameter may begin in one and end in the next. The weights that were trained are
stored as their fp32 masters alone, so the weight is that master.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/zero/stage3.py (`_rigid_state_dict`), deepspeed/utils/zero_to_fp32.py, v0.19.8.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ckpttools.dtypes import DType
from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.book import FLAT_STATES, MASTER, WEIGHT, Book
from ckpttools.layouts.deepspeed.flat import share_of
from ckpttools.layouts.deepspeed.fused_experts import Fused, rank_of
from ckpttools.layouts.deepspeed.parts import Key, flat_pieces
from ckpttools.layouts.deepspeed.ranks import ModelFile, OptimizerFile
from ckpttools.layouts.deepspeed.states import Files, Stored, count, items, numbered, table
from ckpttools.model import Piece
from ckpttools.pickles.views import kind_of

_OFFLOADED = (
    "its values lie in `offloaded_tensors/`, on NVMe when it was saved: resume there, turn that offload off, and save again"
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The flat groups of one rank under one key, one after the other."""

    key: Key
    groups: tuple[Stored | None, ...]
    starts: tuple[int, ...]
    """Where each begins in the stretch."""
    held: int
    """Elements in it, those of groups that have no such state included."""

    @property
    def dtype(self) -> DType | None:
        """Of its elements; None when nothing could be located."""
        return next((s.dtype for s in self.groups if s is not None), None)

    def has(self, at: int) -> bool:
        """Whether the group that holds element `at` has this kind of state."""
        return self.groups[max(0, bisect_right(self.starts, at) - 1)] is not None

    def pieces(self, shape: tuple[int, ...], at: int, first: int, stop: int, rank: int) -> list[Piece]:
        """The elements [first, stop) of a parameter, which begin at element `at` of the stretch."""
        found: list[Piece] = []
        g = max(0, bisect_right(self.starts, at) - 1)
        while first < stop and g < len(self.groups):
            stored = self.groups[g]
            within = at - self.starts[g]
            end = self.starts[g + 1] if g + 1 < len(self.starts) else self.starts[g] + (stored.numel if stored else 0)
            taken = min(stop - first, max(0, end - at))
            if stored is not None and 0 < taken <= stored.numel - within:
                found += flat_pieces(shape, first, first + taken, stored.extent, stored.dtype, rank, skipped=within)
            first, at, g = first + taken, at + taken, g + 1
        return found


def read_stage3(
    book: Book,
    files: Files,
    models: Mapping[int, ModelFile],
    ranks: Mapping[int, OptimizerFile],
    fused: Mapping[str, Fused],
    *,
    tp: int,
    dp: int,
) -> None:
    """The weights and the optimizer of one model-parallel rank, from the files of its data-parallel ranks."""
    model = next(iter(models.values()), None)
    if model is None:
        return
    groups = model.shapes or []
    shapes = [(name, shape, g) for g, group in enumerate(groups) for name, shape in group.items()]
    for rank, file in ranks.items():
        place = [_partition(file, g, rank, dp) for g in range(len(groups))]
        parts = [share_of(prod(shape), place[g][0]) for _, shape, g in shapes]
        offsets = [0, *accumulate(parts)]
        ep = rank_of(models[rank].autoep_layers) if rank in models else 0
        stretches = _checked_stretches(
            book, files, file, offsets[-1], f"by the shapes of {len(shapes)} parameters for {dp} ranks"
        )
        for (name, shape, g), part, at in zip(shapes, parts, offsets, strict=False):
            numel = prod(shape)
            first = min(place[g][1] * part, numel)
            if first == numel and book.holds(name, MASTER):  # nothing but padding
                continue
            for stretch, dtype in stretches:
                if stretch.key != MASTER and not stretch.has(at):
                    continue
                pieces, whole = stretch.pieces(shape, at, first, min(first + part, numel), rank), shape
                if name in fused and fused[name].holds(shape, ep):
                    whole, pieces = fused[name].whole_shape(shape), fused[name].whole_pieces(pieces, ep, dtype)
                book.add(name, stretch.key, tp, dtype, whole, pieces, file.path)
                if stretch.key == MASTER:
                    book.add(name, WEIGHT, tp, dtype, whole, pieces, file.path)
        if rank == min(ranks):
            add_numbers(book, files, file, groups, tp=tp)
    read_frozen(book, files, models, tp=tp, dp=dp)


def _partition(file: OptimizerFile, g: int, rank: int, dp: int) -> tuple[int, int]:
    """(number of parts, which one of them the rank has) of a sub-group; groups of experts state their own."""
    stated = items(file.top.get("ds_zero_partition_groups"))
    metadata = table(stated[g]) if g < len(stated) else {}
    own = count(metadata.get("partition_rank"))
    return count(metadata.get("partition_count")) or dp, rank if own is None else own


def _checked_stretches(book: Book, files: Files, file: OptimizerFile, held: int, why: str) -> list[tuple[Stretch, DType]]:
    """The stretches of a rank of which anything could be located; a finding for each that has not `held` elements."""
    found = []
    for stretch in _stretches(book, files, file):
        if stretch.held != held:
            what = "fp32 weights" if stretch.key == MASTER else f"`{stretch.key[0]}`"
            where, expected = f"{what} in {file.path}", f"{held} elements, {why}"
            is_elsewhere = stretch.held == 0 and _has_offloaded(files, file)
            remedy = _OFFLOADED if is_elsewhere else ""
            files.findings.append(Finding("group-mismatch", where, expected, f"{stretch.held} elements", remedy))
        if stretch.dtype is not None:
            found.append((stretch, stretch.dtype))
    return found


def _has_offloaded(files: Files, file: OptimizerFile) -> bool:
    """Whether swap files of an optimizer on NVMe lie beside it; they hold stretches that no file names."""
    beside = file.path.rpartition("/")[0]
    return any(f.path.startswith(f"{beside}/offloaded_tensors/".lstrip("/")) for f in files.listing)


def _stretches(book: Book, files: Files, file: OptimizerFile) -> Iterator[Stretch]:
    """The masters of a rank, then each kind of state of the inner optimizer that has one number per element.

    State of other shapes (scales of 8-bit optimizers, error feedback) is kept as it is, by group and rank.
    """
    masters = [
        files.locate(file.file, record, f"fp32 weights of sub-group {g}")
        for g, record in enumerate(items(file.top.get("fp32_flat_groups")))
    ]
    if not masters:
        remedy = _OFFLOADED if _has_offloaded(files, file) else ""
        files.findings.append(Finding("bad-container", file.path, "`fp32_flat_groups`, as ZeRO 3 writes it", "none", remedy))
        return
    starts = (0, *accumulate(m.numel if m else 0 for m in masters[:-1]))
    held = starts[-1] + (masters[-1].numel if masters[-1] else 0)
    yield Stretch(MASTER, tuple(masters), starts, held)
    states = numbered(table(file.top.get("optimizer_state_dict")).get("state"))
    for key in dict.fromkeys(k for g in range(len(masters)) for k in table(states.get(g))):
        vectors = [_vector(files, file, key, table(states.get(g)).get(key), g) for g in range(len(masters))]
        pairs = [(v, m, g) for g, (v, m) in enumerate(zip(vectors, masters, strict=True)) if v is not None and m is not None]
        misfits = [(v, m, g) for v, m, g in pairs if v.numel != m.numel]
        if misfits and key not in FLAT_STATES:
            for vector, _, g in pairs:
                book.add_apart(f"group_{g}.rank_{file.dp}_{file.mp}", (key,), vector, file.dp, file.path)
            continue
        for vector, master, g in misfits:
            expected = f"{master.numel} elements, as its fp32 weights"
            where = f"`{key}` of sub-group {g} in {file.path}"
            files.findings.append(Finding("group-mismatch", where, expected, f"{vector.numel} elements"))
        if pairs:
            yield Stretch((key,), tuple(vectors), starts, held)


def _vector(files: Files, file: OptimizerFile, key: str, record: object, g: int) -> Stored | None:
    """A state of a sub-group, when it is no single number."""
    stored = files.locate(file.file, record, f"`{key}` of sub-group {g}") if record is not None else None
    return stored if stored is not None and stored.shape != () else None


def add_numbers(book: Book, files: Files, file: OptimizerFile, groups: Sequence[Mapping[str, object]], *, tp: int) -> None:
    """What the optimizer keeps once for a sub-group, such as the step, as the state of each parameter in it."""
    states = numbered(table(file.top.get("optimizer_state_dict")).get("state"))
    for g, group in enumerate(groups if not tp else ()):
        for key, record in table(states.get(g)).items():
            stored = files.locate(file.file, record, f"`{key}` of sub-group {g}")
            for name in group:
                if stored is not None and stored.shape == ():
                    book.add_whole(name, (key,), 0, stored, file.dp, file.path)
                elif stored is None and isinstance(record, (int, float, str)):
                    book.add_object(("optimizer", "state", name, key), kind_of(record), record, "optimizer")


def read_frozen(book: Book, files: Files, models: Mapping[int, ModelFile], *, tp: int, dp: int) -> None:
    """Parameters that are not trained: each rank's padded part, in the model's dtype."""
    for rank, model in models.items():
        for name, shape in model.frozen_shapes.items():
            record = model.fragments.get(name)
            stored = files.locate(model.file, record, f"part of `{name}`") if record is not None else None
            part = share_of(prod(shape), dp)
            if stored is None:
                files.findings.append(Finding("uncovered", f"`{name}` in {model.path}", f"a part of {part} elements", "none"))
                continue
            if stored.numel < part:
                where, expected = f"part of `{name}` in {model.path}", f"{part} elements ({prod(shape)} over {dp} ranks)"
                files.findings.append(Finding("group-mismatch", where, expected, f"{stored.numel} elements"))
                continue
            first = min(rank * part, prod(shape))
            stop = min(first + part, prod(shape))
            pieces = flat_pieces(shape, first, stop, stored.extent, stored.dtype, rank)
            book.add(name, WEIGHT, tp, stored.dtype, shape, pieces, model.path)
