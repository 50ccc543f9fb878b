"""Snapshots without ZeRO: weights in whole state dicts or pipeline layers, and torch's optimizer state by position."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from ckpttools.containers.torch_entries import RankFile
from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.book import WEIGHT, Book
from ckpttools.layouts.deepspeed.counted import Amount, Measure, find_lost, find_lost_layers
from ckpttools.layouts.deepspeed.experts import all_experts, expert_counts, split_expert
from ckpttools.layouts.deepspeed.flattened import add_flat_state
from ckpttools.layouts.deepspeed.likeness import Likeness
from ckpttools.layouts.deepspeed.modules import (
    USUAL_TIE,
    open_layers,
    read_experts,
    read_layers,
    read_modules,
)
from ckpttools.layouts.deepspeed.names import Names, rank_sibling
from ckpttools.layouts.deepspeed.orders import TIED
from ckpttools.layouts.deepspeed.ranks import ModelFile, Ranks
from ckpttools.layouts.deepspeed.settings import read_optimizer_settings
from ckpttools.layouts.deepspeed.states import Files, items, table
from ckpttools.layouts.deepspeed.unflattened import (
    Unflattened,
    add_state,
    name_positions,
    read_unflattened,
    shapes_by_position,
)

Params = list[tuple[str, tuple[int, ...]]]

_SPREAD = re.compile(r"ep_size_(\d{1,9})$")
"""In the name of a group of experts: over how many ranks they are spread."""
_MAX_RANKS = 1 << 16


def read_without_zero(book: Book, files: Files, names: Names, ranks: Ranks) -> None:
    """Weights and optimizer of every rank."""
    read_modules(book, files, ranks)
    optimizers = {
        mp: found
        for mp in range(ranks.pp * ranks.tp)
        if (m := ranks.model_of(mp)) and (found := read_unflattened(m.path, m.file, m.top.get("optimizer"), mp))
    }
    for mp, optimizer in optimizers.items() if len(optimizers) > 1 else ():
        optimizer.prefix = f"rank_{mp}."
    if names.layers:
        _read_pipeline(book, files, names, ranks, optimizers)
    elif names.experts or names.expert_optimizer:
        read_experts(book, files, names, ranks)
        _read_expert_optimizers(book, files, names, ranks, optimizers)
    else:
        for mp, optimizer in optimizers.items():
            model = ranks.model_of(mp)
            params = _parameters(files, model) if model else []
            lost = find_lost(files, optimizer, params, optimizer.path)
            files.findings += [lost] if lost else []
            named = _add_optimizer(book, files, optimizer, params, tp=mp % ranks.tp, is_all=lost is None)
            book.orders.setdefault(mp // ranks.tp, named)
    for optimizer in islice(optimizers.values(), 1):
        read_optimizer_settings(book, optimizer.settings)


def _order(optimizer: Unflattened, named: Mapping[int, str]) -> list[list[str]]:
    """The parameters of each group; none where one has no name."""
    positions = [p for group in optimizer.groups for p in group]
    return [[named[p] for p in group] for group in optimizer.groups] if all(p in named for p in positions) else []


def _add_optimizer(book: Book, files: Files, optimizer: Unflattened, params: Params, *, tp: int, is_all: bool) -> list[list[str]]:
    """One rank's optimizer, of these parameters; returns those of each group, where they are told.

    Args: is_all: whether these are known to be all that it can have; without that, values name them and shapes do not.
    """
    if optimizer.flats:
        return add_flat_state(book, files, optimizer, params, Likeness(files), tp=tp, is_all=is_all)
    shapes = shapes_by_position(files, optimizer)
    named = name_positions(optimizer, shapes, params, _likeness(book, files, optimizer, params, tp=tp), is_all=is_all)
    add_state(book, files, optimizer, named, tp=tp)
    return _order(optimizer, named)


def _likeness(book: Book, files: Files, optimizer: Unflattened, params: Params, *, tp: int) -> Callable[[int, int], bool] | None:
    """Whether the master at a position can be that of a weight; None where there are no masters."""
    if not optimizer.masters:
        return None
    likeness = Likeness(files)
    weights = [book.stored(name, tp) for name, _ in params]
    masters = {p: files.locate(optimizer.file, r, f"fp32 weight {p}") for p, r in optimizer.masters.items()}

    def is_like(position: int, i: int) -> bool:
        master, weight = masters.get(position), weights[i]
        return master is None or weight is None or likeness.may_round_to(master, weight)

    return is_like


def _all_groups(groups: list[list[str]], ranks: int) -> list[list[str]]:
    """The groups of the first expert-parallel rank with the experts of all."""
    numbers = expert_counts(name for group in groups for name in group)
    return [all_experts(group, ranks, numbers) for group in groups]


def _parameters(files: Files, model: ModelFile) -> Params:
    """A state dict's parameters in their order: without buffers, and tied ones under their first name only."""
    found: Params = []
    seen = set()
    for name, record in model.module.items():
        stored = files.locate(model.file, record, f"`{name}`") if name not in model.buffers else None
        if stored is None:
            continue
        identity = (stored.extent, stored.shape)
        if identity not in seen or not stored.numel:
            seen.add(identity)
            found.append((name, stored.shape))
    return found


def _read_pipeline(book: Book, files: Files, names: Names, ranks: Ranks, optimizers: Mapping[int, Unflattened]) -> None:
    """Layers, and per stage the optimizer of the layers on it; a tied module is told by the stage that has no layer for it."""
    opened = open_layers(files, names)
    layers = sorted({layer for layer, _ in opened})
    by_layer: dict[int, list[Params]] = {
        n: [_layer_params(book, files, n, opened.get((n, t))) for t in range(ranks.tp)] for n in layers
    }
    stages = [optimizers.get(pp * ranks.tp) for pp in range(ranks.pp)]
    measure = Measure(files, [o for o in stages if o])
    full = {n: max(by_layer[n], key=len) for n in layers}  # where one rank's file is absent, another's tells what is in it
    split = _split(measure, list(full.values())) if all(stages) else None
    if split is None:
        files.findings += find_lost_layers(measure, full, next(iter(names.layers.values())))
    first = next((n for n in layers if full[n]), 0)
    has_tie = split is not None and any(is_tied for _, _, is_tied in split)
    tied = {first: f"{TIED}{USUAL_TIE}."} if has_tie else {}
    read_layers(book, files, names, ranks, opened, tied)
    for pp in range(ranks.pp):
        start, stop, is_tied = split[pp] if split else (0, len(layers), False)
        for tp in range(ranks.tp):
            optimizer = optimizers.get(pp * ranks.tp + tp)
            if optimizer is None:
                continue
            on_stage = [n for n in layers[start:stop] if n != first or not is_tied]
            params = _named(by_layer[first][tp], tied[first]) if is_tied else []
            params += [p for n in on_stage for p in _named(by_layer[n][tp], tied.get(n, f"{n}."))]
            named = _add_optimizer(book, files, optimizer, params, tp=tp, is_all=split is not None)
            book.orders.setdefault(pp, named)
        book.settle()


def _split(measure: Measure, layers: Sequence[Params]) -> list[tuple[int, int, bool]] | None:
    """The layers of each stage (see `split_layers`), where each has what its optimizer has, in shapes too."""
    wanted, sizes = measure.of_optimizers(), [measure.of_params(params) for params in layers]
    split = split_layers([size.total() for size in sizes], [amount.total() for amount in wanted])
    first = next((i for i, size in enumerate(sizes) if size.total()), 0)
    for (start, stop, is_tied), amount in zip(split or [], wanted, strict=False):
        own = [first] if is_tied else []
        own += [i for i in range(start, stop) if i != first or not is_tied]
        if sum((sizes[i] for i in own), Amount()) != amount:
            return None
    return split


def _layer_params(book: Book, files: Files, layer: int, file: RankFile | None) -> Params:
    """The parameters in a layer's file, which has its buffers, too."""
    found: Params = []
    for name, record in table(file.torch.value).items() if file is not None else ():
        stored = files.locate(file, record, f"`{name}`") if file is not None else None
        is_buffer = f"{layer}.{name}" in book.buffers or any(b.startswith(TIED) and b.endswith(f".{name}") for b in book.buffers)
        if stored is not None and not is_buffer:
            found.append((name, stored.shape))
    return found


def _named(params: Params, prefix: str) -> Params:
    return [(prefix + name, shape) for name, shape in params]


def split_layers(sizes: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int, bool]] | None:
    """Which consecutive layers each stage has, and whether it has the tied module of the first one besides. Pure.

    Args: sizes: parameters (or elements) in each layer. counts: parameters (or elements) of each stage's optimizer.
    Returns: (start, stop, whether the tied module is on it) per stage; None when the numbers do not fit.
    """
    if not sizes:
        return None
    found, start = [], 0
    is_tied = sum(counts) > sum(sizes)
    for stage, count in enumerate(counts):
        extra = sizes[0] if is_tied and stage and sum(counts[stage:]) - sum(sizes[start:]) >= sizes[0] else 0
        options = [(extra, True), (0, False)] if extra else [(0, False)]
        for own, has_tie in options:
            stop, taken = start, own
            while stop < len(sizes) and taken + sizes[stop] <= count and (stop == start or taken < count):
                taken += sizes[stop]
                stop += 1
            if taken == count and (stage + 1 < len(counts) or stop == len(sizes)):
                found.append((start, stop, has_tie or (is_tied and stage == 0)))
                start = stop
                break
        else:
            return None
    return found


def _read_expert_optimizers(book: Book, files: Files, names: Names, ranks: Ranks, optimizers: dict[int, Unflattened]) -> None:
    """One optimizer per expert-parallel rank: of its experts, and a copy of all the rest."""
    opened = []
    for (ep, mp), path in sorted(names.expert_optimizer.items()):
        file = files.open(path, ep)
        optimizer = read_unflattened(path, file, table(file.torch.value).get("optimizer"), ep) if file else None
        if optimizer is not None and ranks.model_of(mp) is not None:
            opened.append((ep, mp, optimizer))
    size = max([ep + 1 for ep, _ in names.expert_optimizer] + [_most_spread(optimizer) for _, _, optimizer in opened], default=1)
    sample = next(iter(names.expert_optimizer.values()), "")
    for ep in range(min(size, _MAX_RANKS)):
        if sample and (ep, 0) not in names.expert_optimizer:
            found = f"{len(names.expert_optimizer)} files"
            files.findings.append(Finding("missing-rank", rank_sibling(sample, ep), f"one file for each of {size} ranks", found))
    for ep, mp, optimizer in opened:
        model = ranks.model_of(mp)
        if model is None:
            continue
        optimizers.setdefault(mp, optimizer)
        optimizer.prefix = f"rank_{ep}_{mp}." if len(names.expert_optimizer) > 1 else ""
        optimizer.fused = {n: (f, ep % len(f.ranks)) for n, f in ranks.fused.items()}
        named = _name_parts(book, files, optimizer, model, ep, size, tp=mp % ranks.tp)
        add_state(book, files, optimizer, named, tp=mp % ranks.tp)
        book.orders.setdefault(mp // ranks.tp, _all_groups(_order(optimizer, named), size))
        book.settle()


def _name_parts(
    book: Book, files: Files, optimizer: Unflattened, model: ModelFile, ep: int, size: int, *, tp: int
) -> dict[int, str]:
    """The name of each position; of no expert's where one is not there, which another layer's would be taken for."""
    shapes = shapes_by_position(files, optimizer)
    found: list[dict[int, str]] = []
    lost: list[Finding] = []
    for at, (part, params) in enumerate(_parts_of(book, optimizer, _parameters(files, model), ep, size)):
        taken = {split_expert(name)[0] for named in found for name in named.values()}
        left = [p for p in params if split_expert(p[0])[0] not in taken]
        absent = find_lost(files, part, left, "the files of the experts" if at else model.path)
        lost += [absent] if absent else []
        likeness = _likeness(book, files, part, left, tp=tp)
        found.append(name_positions(part, shapes, left, likeness, is_all=absent is None))
        if at and lost:
            found[1:] = []
    files.findings += lost
    return {position: name for named in found for position, name in named.items()}


def _parts_of(book: Book, optimizer: Unflattened, shared: Params, ep: int, size: int) -> Iterator[tuple[Unflattened, Params]]:
    """(the groups that go together, the parameters that can be in them): what all ranks have, then the experts by their spread.

    A group of experts is named by the number of ranks that share them: `ep_size_2`.
    """
    settings = [table(g) for g in items(optimizer.settings.get("param_groups"))]
    spreads = [_spread(s, size) if s.get("moe") is True else 0 for s in settings]
    yield _groups_that(optimizer, spreads, 0), shared
    for spread in sorted(set(spreads) - {0}, reverse=True):  # fewer layers can have the larger one
        fused = [
            (name, f.local_shape(book.shape(name) or (), rank))
            for name, (f, rank) in optimizer.fused.items()
            if len(f.ranks) == spread and book.holds(name, WEIGHT)
        ]
        yield _groups_that(optimizer, spreads, spread), [*_experts_of(book, ep % spread, spread), *fused]


def _most_spread(optimizer: Unflattened) -> int:
    """The most ranks over which the experts of any group are spread, as the groups' names say."""
    settings = [table(g) for g in items(optimizer.settings.get("param_groups"))]
    return max((_spread(s, _MAX_RANKS) for s in settings if _SPREAD.search(str(s.get("name")))), default=1)


def _spread(setting: Mapping[str, object], size: int) -> int:
    """Over how many ranks the experts of a group are spread; all, where its name does not say so."""
    found = _SPREAD.search(str(setting.get("name")))
    return max(1, min(int(found[1]), size)) if found else size


def _experts_of(book: Book, ep: int, size: int) -> Params:
    """The experts' parameters on one expert-parallel rank, in the order of the model, of the layers that can have that spread."""
    numbers: dict[str, int] = {}
    split = {name: split_expert(name) for name in book.names(WEIGHT)}
    for prefix, number, _ in split.values():
        if number is not None:
            numbers[prefix] = max(numbers.get(prefix, 0), number + 1)
    return [
        (name, book.shape(name) or ())
        for name, (prefix, number, _) in split.items()
        if number is not None and numbers[prefix] % size == 0 and number // (numbers[prefix] // size) == ep
    ]


def _groups_that(optimizer: Unflattened, spreads: Sequence[int], wanted: int) -> Unflattened:
    """The optimizer with only some of its groups, by the ranks that share them (0: all)."""
    part = Unflattened(optimizer.path, optimizer.file, optimizer.state, masters=optimizer.masters, rank=optimizer.rank)
    for positions, names, spread in zip(optimizer.groups, optimizer.stated_names, spreads, strict=False):
        if spread == wanted:
            part.groups.append(positions)
            part.stated_names.append(names)
    return part
