"""Universal checkpoints: a folder per parameter, a file per state, each a whole tensor.

With tensor parallelism a file is a mapping with `param` and how it was merged; ZeRO 3 without it writes bare flat tensors,
whose shapes the model files state. A vocabulary is stored without its padding.

Source: deepspeedai/DeepSpeed, deepspeed/checkpoint/ds_to_universal.py, v0.19.8.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod

from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.book import MASTER, WEIGHT, Book
from ckpttools.layouts.deepspeed.names import SETTINGS, Names, state_name
from ckpttools.layouts.deepspeed.parts import whole_piece
from ckpttools.layouts.deepspeed.ranks import OptimizerFile, Ranks
from ckpttools.layouts.deepspeed.stage3 import add_numbers, read_frozen
from ckpttools.layouts.deepspeed.states import Files, table
from ckpttools.pickles.views import kind_of

_MAX_NAMED = 64


def read_universal(book: Book, files: Files, names: Names, ranks: Ranks, settings: OptimizerFile | None) -> None:
    """Every state of every parameter; where no file has the weight, the master is it. ZeRO 3 has the step in the settings."""
    shapes = {n: s for model in ranks.models.values() for group in model.shapes or [] for n, s in group.items()}
    for (name, state), path in sorted(names.universal.items()):
        file = files.open(path)
        if file is None:
            continue
        record = file.torch.value
        content = table(record).get("param", record)
        stored = files.locate(file, content, f"`{state}` of `{name}`")
        if stored is None:
            if isinstance(content, (int, float)):
                book.add_object(("optimizer", "state", name, state), kind_of(content), content, "optimizer")
            else:
                files.findings.append(Finding("bad-container", path, "a tensor, or a mapping with `param`", kind_of(content)))
            continue
        shape = stored.shape
        if ranks.stage == 3 and name in shapes and len(shape) == 1 and shape != shapes[name]:
            shape = shapes[name]
            if prod(shape) != stored.numel:
                expected = f"{prod(shape)} elements, as {list(shape)}"
                files.findings.append(Finding("group-mismatch", path, expected, f"{stored.numel} elements"))
                continue
        pieces = [whole_piece(shape, stored.extent, 0)]
        key = MASTER if state == "fp32" else (state,)
        book.add_merged(name, key, stored.dtype, shape, pieces, path)
        if key == MASTER and not book.holds(name, WEIGHT):  # so it is of ZeRO 3, of layers of pipelines, and of experts
            book.add_merged(name, WEIGHT, stored.dtype, shape, pieces, path)
    first = ranks.first
    if ranks.stage == 3 and settings is not None and first is not None:
        add_numbers(book, files, settings, first.shapes or [], tp=0)
    if ranks.stage == 3:
        read_frozen(book, files, {dp: m for (dp, _), m in sorted(ranks.models.items())}, tp=0, dp=ranks.dp)
    files.findings += _missing(names, ranks, set(shapes))


def _missing(names: Names, ranks: Ranks, trained: set[str]) -> list[Finding]:
    """A finding per state that other parameters have, or per trained parameter that has no folder."""
    states: dict[str, set[str]] = defaultdict(set)
    for name, state in names.universal:
        states[name].add(state)
    usual: dict[str, int] = defaultdict(int)
    for name in trained & states.keys():
        for state in states[name]:
            usual[state] += 1
    wanted = {s for s, n in usual.items() if 2 * n > len(trained)} | {"fp32"}
    sample = next(iter(names.universal.values()), names.settings)
    root = sample[: sample.index("zero/")] if "zero/" in sample else ""
    absent = [root + state_name(name, state) for name in sorted(trained) for state in sorted(wanted) if state not in states[name]]
    if not names.settings:
        absent.insert(0, root + SETTINGS)
    found = f"{len(names.universal)} files"
    return [Finding("missing-file", path, "a file for every state of every parameter", found) for path in absent[:_MAX_NAMED]]
