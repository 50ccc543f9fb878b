"""How a rank's file spells the tensors that it holds: layers numbered from 0 in each chunk, experts from 0 on each rank.

The inverse of `resolution`: from whole names, and what is held at a rank, to the names in its file. What the arguments of
the run say decides the spelling, because the model that will load the file is built from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.layouts.megatron_legacy.arguments import Arguments
from ckpttools.layouts.megatron_legacy.numbering import parse_layer
from ckpttools.layouts.megatron_legacy.rules import EMBEDDING, LOCAL_EXPERT

_LOCAL_SPELLING = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)"), r"pre_mlp_layernorm.\1"),
)


@dataclass(frozen=True)
class ChunkNames:
    """The tensors of one chunk of a rank: whole name and name as stored, in the order of the model."""

    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Speller:
    """Spells names for one rank."""

    is_local: bool
    """Whether norms are modules of their own."""
    numbers_experts_last: bool
    """Whether an expert's number stands at the end: `linear_fc1.weight3`."""
    is_last_of_several: bool
    """Whether the rank is of the last stage of several, where a tied embedding is called as the output layer."""
    first_experts: Mapping[str, int] = field(default_factory=dict)
    """Per list of experts (with global layer numbers) the first one on this rank."""

    @classmethod
    def of(cls, arguments: Arguments, held: Iterable[str], *, is_last_of_several: bool) -> Speller:
        """For a rank that holds tensors with these whole names."""
        first: dict[str, int] = {}
        for name in held:
            match = LOCAL_EXPERT.fullmatch(name)
            if match:
                number = int(match["expert"])
                first[match["module"]] = min(first.get(match["module"], number), number)
        is_local = arguments.values.get("transformer_impl") == "local"
        return cls(is_local, arguments.flag("moe_grouped_gemm") is True, is_last_of_several, first)

    def in_order(self, held: Sequence[str]) -> list[str]:
        """Names in the order of the model's parameters: expert after expert, or (grouped) one linear layer of all experts
        after the other."""
        first: dict[str, int] = {}
        place: dict[str, tuple[int, int, int]] = {}
        rests: dict[str, int] = {}
        for i, name in enumerate(held):
            match = LOCAL_EXPERT.fullmatch(name)
            if match is None:
                place[name] = (i, 0, 0)
                continue
            at = first.setdefault(match["module"], i)
            number, rest = int(match["expert"]), rests.setdefault(match["rest"], len(rests))
            place[name] = (at, rest, number) if self.numbers_experts_last else (at, number, rest)
        return sorted(held, key=place.__getitem__)

    def stored(self, name: str, first_layer: int) -> str:
        """The name in the file of a tensor in a chunk whose list of layers begins with `first_layer`."""
        if self.is_last_of_several and name.endswith(EMBEDDING):
            head = "word_embeddings_for_head.weight" if name.startswith("language_model.") else "output_layer.weight"
            return head if name in (EMBEDDING, f"language_model.{EMBEDDING}") else name
        match = LOCAL_EXPERT.fullmatch(name)
        if match:
            number = int(match["expert"]) - self.first_experts.get(match["module"], 0)
            linear, _, what = match["rest"].rpartition(".")
            if self.numbers_experts_last and linear.startswith("linear_fc"):
                name = f"{match['module']}.{linear}.{what}{number}"
            else:
                name = f"{match['module']}.local_experts.{number}.{match['rest']}"
        layer = parse_layer(name)
        if layer is None:
            return name
        rest = layer.rest
        if self.is_local:
            rest = next((p.sub(new, rest) for p, new in _LOCAL_SPELLING if p.fullmatch(rest)), rest)
        return f"{layer.layers}.{layer.number - first_layer}.{rest}"


def chunks_of(held: Sequence[str], speller: Speller, count: int) -> list[ChunkNames]:
    """The chunks of a rank: runs of layers with numbers that follow each other; what is in no layer goes before or after.

    Args:
        held: whole names of the tensors that the rank holds, in the order of the model.
        count: how many chunks each stage has.
    """
    numbers: dict[str, list[int]] = {}
    for name in held:
        layer = parse_layer(name)
        if layer is not None and layer.number not in numbers.setdefault(layer.layers, []):
            numbers[layer.layers].append(layer.number)
    firsts = {layers: _run_starts(sorted(found)) for layers, found in numbers.items()}
    chunks: list[list[tuple[str, str]]] = [[] for _ in range(count)]
    after: list[tuple[str, str]] = []
    for name in speller.in_order(held):
        layer = parse_layer(name)
        if layer is None:
            stored = speller.stored(name, 0)
            if stored != name:  # a tied embedding, which stands where the output layer would
                after.append((name, stored))
            else:
                chunks[0 if "embedding" in name else -1].append((name, stored))
            continue
        starts = firsts[layer.layers]
        chunk = max(i for i, start in enumerate(starts) if start <= layer.number)
        chunks[min(chunk, count - 1)].append((name, speller.stored(name, starts[chunk])))
    chunks[-1] += after
    return [ChunkNames(tuple(names)) for names in chunks]


def _run_starts(numbers: Sequence[int]) -> list[int]:
    """The first of each run of numbers that follow each other."""
    return [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
