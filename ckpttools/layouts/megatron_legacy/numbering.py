"""Global numbers for layers that each chunk of a pipeline numbers from 0.

Chunks follow each other with the virtual stage outermost: all stages' first chunks, then all stages' second ones. How
many layers a chunk has is counted from its tensors, so any split is read, even or not; the arguments are only asked for
stages whose files are not there.

Source: NVIDIA/Megatron-LM, megatron/core/transformer/transformer_layer.py (get_transformer_layer_offset), core_v0.16.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpttools.findings import Finding
from ckpttools.layouts.megatron_legacy.arguments import Arguments
from ckpttools.layouts.megatron_legacy.names import Parallel
from ckpttools.layouts.megatron_legacy.shards import Chunk

_LAYER = re.compile(r"(?P<list>(?:.*?\.)?layers)\.(?P<number>\d{1,6})\.(?P<rest>.+)")
_MAIN_LISTS = {
    "decoder.layers": ("decoder_num_layers", "num_layers"),
    "encoder.layers": ("encoder_num_layers", "num_layers"),
    "transformer.layers": ("num_layers",),
}
"""The lists of layers of a language model, and the arguments that state their length."""

Cell = tuple[int, int]
"""(chunk, stage): the order in which layers are numbered."""


@dataclass(frozen=True, slots=True)
class LayerName:
    """A name inside a layer, taken apart."""

    layers: str
    """The list that the layer is in: `decoder.layers`."""
    number: int
    rest: str


def parse_layer(name: str) -> LayerName | None:
    """A name inside a layer; None for one that is in no layer. Pure."""
    match = _LAYER.fullmatch(name)
    return LayerName(match["list"], int(match["number"]), match["rest"]) if match else None


@dataclass(frozen=True)
class Numbering:
    """Where the layers of each chunk begin."""

    offsets: Mapping[tuple[str, Cell], int] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    """Layers per list, over all chunks that are there."""

    def number(self, layers: str, chunk: Chunk, local: int) -> int:
        """The global number of a chunk's layer `local`."""
        return self.offsets.get((layers, (chunk.number, chunk.place.pp)), 0) + local


def number_layers(chunks: Iterable[Chunk], mesh: Parallel, arguments: Arguments) -> tuple[Numbering, list[Finding]]:
    """Count the layers of each chunk and add them up in order; hold the sum against the arguments."""
    counts: dict[str, dict[Cell, int]] = defaultdict(dict)
    there: set[Cell] = set()
    for chunk in chunks:
        cell = (chunk.number, chunk.place.pp)
        there.add(cell)
        for name in (*chunk.tensors, *chunk.objects):
            layer = parse_layer(name)
            if layer is not None:
                counts[layer.layers][cell] = max(counts[layer.layers].get(cell, 0), layer.number + 1)
    cells = [(chunk, stage) for chunk in range(mesh.vpp) for stage in range(mesh.pp)]
    absent = [cell for cell in cells if cell not in there]
    offsets: dict[tuple[str, Cell], int] = {}
    totals: dict[str, int] = {}
    findings: list[Finding] = []
    for layers, count in counts.items():
        stated = _stated(layers, arguments)
        each = max(0, (stated or 0) - sum(count.values())) // len(absent) if absent else 0
        total = 0
        for cell in cells:
            offsets[layers, cell] = total
            total += count.get(cell, each if cell in absent else 0)
        totals[layers] = sum(count.values())
        if stated is not None and not absent and total != stated and total not in _other_lengths(layers, arguments):
            where = f"{layers} over {mesh.pp} stages" + (f" of {mesh.vpp} chunks" if mesh.vpp > 1 else "")
            findings.append(Finding("arguments-mismatch", where, f"{stated} layers, as the arguments state", f"{total} layers"))
    return Numbering(offsets, totals), findings


def _lengths(layers: str, arguments: Arguments) -> list[int]:
    names = _MAIN_LISTS.get(layers.removeprefix("module.").removeprefix("language_model."), ())
    return [n for name in names if (n := arguments.number(name)) is not None]


def _stated(layers: str, arguments: Arguments) -> int | None:
    return next(iter(_lengths(layers, arguments)), None)


def _other_lengths(layers: str, arguments: Arguments) -> list[int]:
    """A model with one list may state its length under the other's name."""
    return _lengths(layers, arguments)[1:]
