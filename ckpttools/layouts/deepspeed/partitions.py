"""ZeRO 1 and 2, and the bf16 optimizer: one flat vector per parameter group, cut in equal parts over the ranks.

The order in the vector is that of `param_shapes`; padding stands at its end, and after each parameter where parameters
are aligned. Rank r holds the elements [r * size, (r + 1) * size). The masters are saved with or without their padding, by
the class and the release, and the optimizer's vectors with it; what was done follows from the numbers.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py (`state_dict`), deepspeed/runtime/bf16_optimizer.py
(`state_dict`), deepspeed/utils/zero_to_fp32.py, deepspeed/utils/groups.py, v0.19.8.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.book import FLAT_STATES, MASTER, Book
from ckpttools.layouts.deepspeed.experts import DATA_FIRST, expert_counts, global_names
from ckpttools.layouts.deepspeed.flat import Member, members_of, slices_of
from ckpttools.layouts.deepspeed.fused_experts import Fused
from ckpttools.layouts.deepspeed.parts import Key, flat_pieces
from ckpttools.layouts.deepspeed.ranks import ModelFile, OptimizerFile
from ckpttools.layouts.deepspeed.states import Files, Stored, count, counts, items, members, numbered, table
from ckpttools.pickles.views import kind_of


@dataclass(frozen=True, slots=True)
class Vector:
    """What one rank keeps of a group under one key."""

    key: Key
    stored: Stored


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one rank in a group."""

    file: OptimizerFile
    index: int
    """Which of the equal parts."""
    vectors: tuple[Vector, ...]
    padding: int
    """Elements, as the file states it."""

    @property
    def master(self) -> Stored | None:
        """The fp32 weights."""
        return next((v.stored for v in self.vectors if v.key == MASTER), None)


def read_partitions(
    book: Book,
    files: Files,
    model: ModelFile,
    ranks: Mapping[int, OptimizerFile],
    fused: Mapping[str, Fused],
    *,
    tp: int,
    dp: int,
) -> None:
    """The optimizer of one model-parallel rank, from the files of its data-parallel ranks."""
    if not ranks:
        return
    shapes = model.shapes or []
    first = next(iter(ranks.values()))
    groups = len(items(first.top.get("single_partition_of_fp32_groups")))
    if groups != len(shapes):
        where = f"{first.path} and {model.path}"
        files.findings.append(Finding("group-mismatch", where, f"{len(shapes)} parameter groups", f"{groups} groups"))
    numbers = expert_counts(name for group in shapes for name in group)
    for g, group_shapes in enumerate(shapes[:groups]):
        stated = first.partitions
        at = first.place(g)
        parts = stated[at] if at < len(stated) and stated[at] else dp
        for ep, sharers in _sharers(ranks, parts, dp, first):
            names = {} if ep is None else global_names(group_shapes, ep, numbers)
            spread = {} if ep is None else {n: (f, ep) for n, f in fused.items()}
            placed = members_of(((names.get(n, n), s) for n, s in group_shapes.items()), _alignment(first, g))
            shares = [_read_share(book, files, file, g, index) for index, file in sharers]
            _read_group(book, files, model, g, placed, [s for s in shares if s.vectors], parts, spread, tp=tp)


def _sharers(
    ranks: Mapping[int, OptimizerFile], parts: int, dp: int, first: OptimizerFile
) -> Iterator[tuple[int | None, list[tuple[int, OptimizerFile]]]]:
    """Which ranks share one flat vector, and their expert-parallel rank, where there are several vectors.

    Expert groups have fewer parts than there are ranks: each expert-parallel rank has a vector of its own, of experts
    that are numbered from 0 on every rank.
    """
    groups = dp // parts if parts and dp % parts == 0 else 1
    if groups <= 1:
        yield None, [(r, f) for r, f in ranks.items() if r < parts]
        return
    is_data_first = first.config.get(DATA_FIRST) is True
    for ep in range(groups):
        if is_data_first:
            sharers = [(r % parts, f) for r, f in ranks.items() if r // parts == ep]
        else:
            sharers = [(r // groups, f) for r, f in ranks.items() if r % groups == ep]
        yield ep, sharers


def _alignment(first: OptimizerFile, g: int) -> list[int]:
    paddings, at = items(first.top.get("param_alignment_paddings")), first.place(g)
    return counts(paddings[at]) if at < len(paddings) else []


def _read_share(book: Book, files: Files, file: OptimizerFile, g: int, index: int) -> Share:
    """What one rank keeps of a group: vectors here; single numbers are for the caller of `states_of`."""
    masters = items(file.top.get("single_partition_of_fp32_groups"))
    vectors = []
    at = file.place(g)
    master = files.locate(file.file, masters[at], f"fp32 weights of group {g}") if at < len(masters) else None
    if master is not None:
        vectors.append(Vector(MASTER, master))
    for key, record in states_of(file, g).items():
        stored = files.locate(file.file, record, f"`{key}` of group {g}")
        if stored is not None and stored.shape != ():
            vectors.append(Vector((key,), stored))
    paddings = counts(file.top.get("group_paddings"))
    return Share(file, index, tuple(vectors), paddings[at] if at < len(paddings) else 0)


def states_of(file: OptimizerFile, g: int) -> dict[str, object]:
    """The inner optimizer's state of a group: `state` by number, or a list per group in elastic checkpoints. Pure."""
    base = file.top.get("base_optimizer_state")
    by_group = numbered(table(base).get("state")) if table(base) else numbered(base)
    return table(by_group.get(file.place(g)))


def _read_group(
    book: Book,
    files: Files,
    model: ModelFile,
    g: int,
    group: Sequence[Member],
    shares: Sequence[Share],
    parts: int,
    spread: Mapping[str, tuple[Fused, int]],
    *,
    tp: int,
) -> None:
    total = group[-1].stop if group else 0
    used = total + sum(_trailing(shares, g))
    size = _part_size(files, g, used, shares, parts, model)
    starts = [m.start for m in group]
    for share in shares:
        low = share.index * size
        _check_slices(files, share, g, group, low, size)
        for vector in share.vectors:
            numel = vector.stored.numel
            held = max(0, min(used - low, size))
            if numel not in (size, held) and not _is_flat_state(vector.key):
                _keep_raw(book, share, g, vector)
                continue
            is_other = numel < held or (numel not in (size, held) and vector.key != MASTER)
            if is_other or len(vector.stored.shape) != 1 or vector.stored.extent.strides is not None:
                what = "fp32 weights" if vector.key == MASTER else f"`{vector.key[0]}`"
                expected = f"{held} elements, or {size} with the padding"
                where = f"{what} of group {g} in {share.file.path}"
                files.findings.append(Finding("group-mismatch", where, expected, f"{list(vector.stored.shape)}"))
            high = low + min(numel, held)
            at = max(0, bisect_right(starts, low) - 1)
            while at < len(group) and group[at].start < high:
                _add_fragment(book, group[at], vector, share, low, high, spread.get(group[at].name), tp=tp)
                at += 1
        _add_numbers(book, files, share, g, group, tp=tp)


def _trailing(shares: Sequence[Share], g: int) -> list[int]:
    """Alignment padding after the last parameter, which counts as held."""
    return _alignment(shares[0].file, g)[-1:] if shares else []


def _is_flat_state(key: Key) -> bool:
    return key == MASTER or key[0] in FLAT_STATES


def _part_size(files: Files, g: int, total: int, shares: Sequence[Share], parts: int, model: ModelFile) -> int:
    """Elements in each of the equal parts of a group, told by what the ranks hold and the paddings that they state."""
    lengths = {s.file.path: (s.index, s.master.numel if s.master else 0, s.padding) for s in shares}
    if not lengths:
        return max(1, -(-total // max(parts, 1)))
    stripped = max(numel + padding for _, numel, padding in lengths.values())
    kept = max(numel for _, numel, _ in lengths.values())
    candidates = [(size, keeps) for size, keeps in ((stripped, False), (kept, True), (kept, False)) if size * parts >= total]

    def misfits(size: int, *, keeps: bool) -> list[str]:
        held = {path: size if keeps else max(0, min(total - i * size, size)) for path, (i, _, _) in lengths.items()}
        return [path for path, (_, numel, _) in lengths.items() if numel != held[path]]

    best = min(candidates, key=lambda c: len(misfits(c[0], keeps=c[1])), default=None)
    if best is None:
        named = ", ".join(f"{numel} in {path}" for path, (_, numel, _) in list(lengths.items())[:4])
        where = f"group {g} of {model.path}"
        found = f"{kept * parts} elements in {parts} parts: {named}"
        files.findings.append(Finding("group-mismatch", where, f"{total} elements, by the shapes of its parameters", found))
        return max(kept, 1)
    size, keeps = best
    for path in misfits(size, keeps=keeps):
        index, numel, _ = lengths[path]
        expected = f"{max(0, min(total - index * size, size))} elements (part {index} of {parts}, {total} in all)"
        files.findings.append(Finding("group-mismatch", f"group {g} in {path}", expected, f"{numel} elements"))
    has_stated = all(g < len(items(s.file.top.get("group_paddings"))) for s in shares)
    if len(shares) == parts and has_stated and sum(s.padding for s in shares) != size * parts - total:
        expected = f"paddings of {size * parts - total} elements in all ({parts} parts of {size}, {total} elements)"
        found = ", ".join(f"{s.padding} in {s.file.path}" for s in shares if s.padding) or "none"
        files.findings.append(Finding("group-mismatch", f"group {g} of {model.path}", expected, found))
    return max(size, 1)


def _add_fragment(
    book: Book,
    member: Member,
    vector: Vector,
    share: Share,
    low: int,
    high: int,
    spread: tuple[Fused, int] | None,
    *,
    tp: int,
) -> None:
    """The elements of a parameter that a rank's vector holds, which stands for [low, high) of the group."""
    start, stop = max(member.start, low), min(member.stop, high)
    if start >= stop:
        return
    stored = vector.stored
    extent = replace(stored.extent, offset=stored.extent.offset + (start - low) * stored.dtype.item_bytes)
    pieces = flat_pieces(member.shape, start - member.start, stop - member.start, extent, stored.dtype, share.file.dp)
    shape = member.shape
    if spread is not None and spread[0].holds(shape, spread[1]):
        fused, ep = spread
        shape, pieces = fused.whole_shape(shape), fused.whole_pieces(pieces, ep, stored.dtype)
    add = book.add_stale if book.is_settled(member.name, vector.key) else book.add
    add(member.name, vector.key, tp, stored.dtype, shape, pieces, share.file.path)


def _add_numbers(book: Book, files: Files, share: Share, g: int, group: Sequence[Member], *, tp: int) -> None:
    """What the optimizer keeps once for a group, such as the step, as the state of each parameter in it."""
    if tp or share.index:
        return
    for key, record in states_of(share.file, g).items():
        stored = files.locate(share.file.file, record, f"`{key}` of group {g}")
        for member in group:
            if stored is not None and stored.shape == () and not book.holds(member.name, (key,)):
                book.add_whole(member.name, (key,), 0, stored, share.file.dp, share.file.path)
            elif stored is None and isinstance(record, (int, float, str)):
                path = ("optimizer", "state", member.name, key)
                book.add_object(path, kind_of(record), record, "optimizer")


def _keep_raw(book: Book, share: Share, g: int, vector: Vector) -> None:
    """State that is not one number per element of the group (error feedback of compressed optimizers), by group and rank."""
    name = f"group_{g}.rank_{share.file.dp}_{share.file.mp}"
    book.add_apart(name, vector.key, vector.stored, share.file.dp, share.file.path)


def _check_slices(files: Files, share: Share, g: int, group: Sequence[Member], low: int, size: int) -> None:
    """Which parameters the rank says that it holds, and where, against where they must be."""
    mappings, at = share.file.slices, share.file.place(g)
    is_shuffled = table(share.file.config.get("zero_optimization")).get("round_robin_gradients") is True
    if is_shuffled or at >= len(mappings) or not mappings[at]:  # with round robin, DeepSpeed itself writes wrong names
        return
    expected = slices_of(group, low, size)
    stated = {}
    for name, record in mappings[at].items():
        part = members(record)
        stated[name] = (count(part.get("start")), count(part.get("numel")))
    renamed = dict(zip(stated.values(), stated, strict=False))
    for name, place in expected.items():
        if place not in renamed:
            found = f"{stated[name][1]} elements from {stated[name][0]}" if name in stated else "no such slice"
            where = f"`{name}` of group {g} in {share.file.path}"
            files.findings.append(
                Finding("group-mismatch", where, f"{place[1]} elements from {place[0]} of this rank's part", found)
            )
            return
