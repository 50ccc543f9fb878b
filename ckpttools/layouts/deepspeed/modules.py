"""Weights: the state dict of a rank, the layers of a pipeline, the experts; all in the dtype that training used.

A pipeline names a layer's tensors by its number, and those of a tied module `tied_modules.<key>.`; the files have neither, so
the key is found where the shapes of the optimizer state it. A tied module may lie on two stages: the first one's copy
is what training reads.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/pipe/module.py, deepspeed/runtime/engine.py (`_save_moe_checkpoint`), v0.19.8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpttools.containers.torch_entries import RankFile
from ckpttools.containers.torch_values import MalformedError, TensorValue, read_value
from ckpttools.findings import ERROR, WARNING, Finding
from ckpttools.layouts.deepspeed.book import MASTER, WEIGHT, Book
from ckpttools.layouts.deepspeed.experts import is_expert
from ckpttools.layouts.deepspeed.fused_experts import split_number
from ckpttools.layouts.deepspeed.names import Names, expert_name, layer_sibling
from ckpttools.layouts.deepspeed.orders import TIED
from ckpttools.layouts.deepspeed.ranks import ModelFile, Ranks
from ckpttools.layouts.deepspeed.states import Files, Stored, counts, table
from ckpttools.layouts.families import MODEL
from ckpttools.model import Box, Extent, Piece
from ckpttools.pickles.views import kind_of

USUAL_TIE = "embed"
"""The key of the tied embedding in Megatron-DeepSpeed, BLOOM and GPT-NeoX, for checkpoints that do not state one."""
_MAX_NAMED = 64


def read_modules(book: Book, files: Files, ranks: Ranks) -> None:
    """The state dict in each model file."""
    filled: dict[int, dict[str, object]] = {}  # most ranks of ZeRO 3 have one and the same, of which little is not empty
    for (dp, mp), model in sorted(ranks.models.items(), key=lambda item: (item[0][1], item[0][0])):
        trained = {name for group in model.shapes or [] for name in group}
        if ranks.stage == 3 and dp > 0:
            if id(model.module) not in filled:
                filled[id(model.module)] = {n: r for n, r in model.module.items() if not _is_empty(r)}
            records = filled[id(model.module)]
        else:
            records = model.module
        for name, record in records.items():
            stored = files.locate(model.file, record, f"`{name}`")
            if stored is None:
                if record is not None:
                    book.add_object((name,), kind_of(record), record, MODEL)
            elif ranks.stage < 3:
                book.add_whole(name, WEIGHT, mp % ranks.tp, stored, mp, model.path, is_stale=mp >= ranks.tp)
            elif name in model.buffers or stored.numel:
                book.add_whole(name, WEIGHT, mp % ranks.tp, stored, dp, model.path, is_stale=dp > 0)
            elif name not in trained and name not in model.frozen_shapes and name not in book.shared and dp == 0:
                may_be_tied = not book.has_all_ties or "frozen_param_shapes" in model.top
                files.findings.append(_lost(model, name, may_be_tied=may_be_tied))
        book.buffers |= model.buffers


def _lost(model: ModelFile, name: str, *, may_be_tied: bool) -> Finding:
    """A finding for an empty tensor of ZeRO 3 that nothing else in the files belongs to.

    Since 0.9.2 tied names are listed, so it is lost; before, it may be tied to another parameter. Where frozen parameters are
    listed it can only be a further name: of a module that its parent has twice, ties list the first alone.
    """
    found = "an empty tensor, as of a parameter that was frozen when releases before 0.9.1 saved it"
    severity, remedy = ERROR, "take it from the model that training started from"
    if may_be_tied:
        found, severity = f"{found}, or that is tied to another one", WARNING
    return Finding("no-data", f"`{name}` in {model.path}", "values, or a shape", found, remedy, severity)


def _is_empty(record: object) -> bool:
    """Whether it is a tensor without elements, as ZeRO 3 leaves of every parameter."""
    try:
        value = read_value(record)
    except MalformedError:
        return False
    return isinstance(value, TensorValue) and 0 in value.shape


def share_tied(book: Book, ranks: Ranks) -> None:
    """Give a tied parameter its further names, where only one of them has values (ZeRO 3)."""
    for alias, kept in book.shared.items():
        if book.holds(kept, WEIGHT) and not book.holds(alias, WEIGHT):
            book.alias(alias, kept)


def open_layers(files: Files, names: Names) -> dict[tuple[int, int], RankFile]:
    """The layers of a pipeline that can be understood, by number and tensor-parallel rank."""
    return {key: file for key, path in sorted(names.layers.items()) if (file := files.open(path, key[1])) is not None}


def read_layers(
    book: Book, files: Files, names: Names, ranks: Ranks, opened: Mapping[tuple[int, int], RankFile], tied: Mapping[int, str]
) -> None:
    """The layers of a pipeline, one file per layer and tensor-parallel rank.

    Args: tied: number of each layer that holds a tied module -> the prefix of its names.
    """
    for (layer, tp), file in opened.items():
        prefix = book.layers[layer] = tied.get(layer, f"{layer}.")
        for name, record in table(file.torch.value).items():
            stored = files.locate(file, record, f"`{name}`")
            if stored is not None:
                book.add_whole(prefix + name, WEIGHT, tp, stored, tp, file.path)
            elif record is not None:
                book.add_object((prefix + name,), kind_of(record), record, MODEL)
    files.findings += _missing_layers(names, ranks, ranks.trained, book)


def _ties(known: Iterable[str]) -> dict[str, set[str]]:
    """Prefix of each tied module -> the names of its parameters without it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in known:
        if name.startswith(TIED):
            key, dot, rest = name[len(TIED) :].partition(".")
            found[f"{TIED}{key}{dot}"].add(rest)
    return found


def tied_layers(opened: Mapping[tuple[int, int], RankFile], known: set[str]) -> dict[int, str]:
    """Number of each layer that holds a tied module -> the prefix of its names, by the names that are trained. Pure."""
    found: dict[int, str] = {}
    ties = _ties(known)
    for (layer, _), file in opened.items():
        names = set(table(file.torch.value))
        if names and not any(f"{layer}.{name}" in known for name in names):
            prefix = next((p for p, params in sorted(ties.items()) if params & names), None)
            if prefix is not None:
                found[layer] = prefix
    return found


def _missing_layers(names: Names, ranks: Ranks, known: set[str], book: Book) -> list[Finding]:
    """A finding per file of a layer that must be there: of a rank that others have, or of parameters that are trained."""
    directory, slash, _ = next(iter(names.model.values()), "").rpartition("/")
    sample = next(iter(names.layers.values()), f"{directory}{slash}layer_00-model_00-model_states.pt")
    layers = {layer for layer, _ in names.layers}
    for name in known:
        number, dot, _ = name.partition(".")
        if dot and number.isascii() and number.isdigit() and len(number) < 10 and not book.holds(name, WEIGHT):
            layers.add(int(number))
    absent = [(n, t) for n in sorted(layers) for t in range(ranks.tp) if (n, t) not in names.layers]
    found = f"{len(names.layers)} of {len(layers) * ranks.tp} files"
    return [
        Finding(
            "missing-file",
            layer_sibling(sample, n, t),
            f"one file for each of {len(layers)} layers and {ranks.tp} tensor-parallel ranks",
            found,
        )
        for n, t in absent[:_MAX_NAMED]
    ]


def missing_weights(book: Book, names: Names) -> list[Finding]:
    """A finding per parameter whose master is there and whose weight is not, unless the file that lacks is named already."""
    absent = [n for n in book.names(MASTER) if not book.holds(n, WEIGHT) and not n[:1].isdigit() and not is_expert(n)]
    absent = [n for n in absent if not n.startswith("group_")]
    if not names.layers:
        return [Finding("uncovered", f"weight of `{n}`", "a weight, as its master is there", "none") for n in absent[:_MAX_NAMED]]
    directory, slash, _ = next(iter(names.layers.values())).rpartition("/")
    where, expected = f"{directory}{slash}layer_*-model_states.pt", "the layer's file with"
    return [Finding("missing-file", f"{where} with `{n}`", f"{expected} `{n}`", "none") for n in absent[:_MAX_NAMED]]


def read_experts(book: Book, files: Files, names: Names, ranks: Ranks) -> None:
    """The experts, one file each; numbers in them are global."""
    for (_, expert, mp), path in sorted(names.experts.items()):
        file = files.open(path, expert)
        for name, record in table(file.torch.value).items() if file else ():
            stored = files.locate(file, record, f"`{name}`") if file else None
            whole, number = split_number(name)
            if stored is None:
                continue
            if whole in ranks.fused and number is not None and number < ranks.fused[whole].experts:
                shape = ranks.fused[whole].whole_shape((1, *stored.shape))
                box = Box((number, *(0,) * len(stored.shape)), (1, *stored.shape))
                book.add(whole, WEIGHT, mp % ranks.tp, stored.dtype, shape, [Piece(box, _row_of(stored), expert)], path)
            else:
                book.add_whole(name, WEIGHT, mp % ranks.tp, stored, expert, path)
    files.findings += _missing_experts(names, ranks)


def _row_of(stored: Stored) -> Extent:
    """The extent of a tensor as that of a row of one with a dimension more."""
    strides = stored.extent.strides
    return stored.extent if strides is None else replace(stored.extent, strides=(0, *strides))


def _missing_experts(names: Names, ranks: Ranks) -> list[Finding]:
    """A finding per absent expert, where the model file says how many each layer has."""
    first = ranks.first
    stated = _expert_counts(first) if first is not None else []
    if not names.experts and not stated:
        return []
    sample = next(iter(names.experts.values()), "")
    directory, slash, _ = (sample or next(iter(names.model.values()), "")).rpartition("/")
    layers = sorted({layer for layer, _, _ in names.experts} | set(range(len(stated))))
    if not stated:
        stated = [max((e for _, e, _ in names.experts), default=0) + 1] * len(layers)
    wanted = [(layer, e, 0) for layer, number in zip(layers, stated, strict=False) for e in range(min(number, 1 << 20))]
    there = {(layer, e, mp % ranks.tp) for layer, e, mp in names.experts}
    absent = [k for k in wanted if k not in there]
    found = f"{len(wanted) - len(absent)} of {len(wanted)} files"
    return [
        Finding(
            "missing-file",
            directory + slash + expert_name(layer, e, mp),
            f"one file for each of {len(wanted)} experts",
            found,
        )
        for layer, e, mp in absent[:_MAX_NAMED]
    ]


def _expert_counts(model: ModelFile) -> list[int]:
    return counts(model.top.get("num_experts"))
