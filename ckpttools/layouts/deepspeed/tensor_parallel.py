"""How the shards of tensor-parallel ranks make the whole tensor: replicated, side by side, or sub-parameter by sub-parameter.

A checkpoint says so in `universal_checkpoint_info`, by patterns of names. Without it the names of Megatron-DeepSpeed, BLOOM
and GPT-NeoX are known; what is neither is taken as DeepSpeed's own converter takes it, along dimension 0, with a finding.

Source: deepspeedai/DeepSpeed, deepspeed/checkpoint/ds_to_universal.py (`merge_tp_slices`), v0.19.8; transformers,
models/bloom/convert_bloom_original_checkpoint_to_pytorch.py; EleutherAI/gpt-neox, tools/ckpts/convert_neox_to_hf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckpttools.findings import WARNING, Finding
from ckpttools.layouts.deepspeed.affine import VERSION, read_affine_map
from ckpttools.layouts.deepspeed.parts import Cut, Placement
from ckpttools.layouts.deepspeed.states import count, counts, items, members, table
from ckpttools.pickles.views import sequence_items

_REPLICATED = re.compile(
    r".*norm.*\.(weight|bias|scale)|(\d+\.)?(weight|bias|scale)|.*(self_attention|attention)\.dense\.bias|.*mlp\.dense_4h_to_h\.bias"
    r"|.*position_embeddings\.weight|.*inv_freq|.*\.gate\.wg\.weight"
)
_ROW_PARALLEL = re.compile(r".*(self_attention|attention)\.dense\.weight|.*mlp\.dense_4h_to_h\.weight")
_COLUMN_PARALLEL = re.compile(
    r".*query_key_value\.(weight|bias)|.*mlp\.dense_h_to_4h\.(weight|bias)|.*word_embeddings\.weight|.*lm_head\.weight"
    r"|.*final_linear\.weight"
)
_MAX_PATTERN, _MAX_NAME, _MAX_REPEATS, _MAX_OUTER = 512, 512, 6, 4096
_REPEAT = re.compile(r"[*+?]|\{")


@dataclass(slots=True)
class Rules:
    """What the checkpoint says of its parameters, by patterns of names."""

    replicated: list[re.Pattern[str]] = field(default_factory=list)
    averaged: list[re.Pattern[str]] = field(default_factory=list)
    row_parallel: list[re.Pattern[str]] = field(default_factory=list)
    halves: list[re.Pattern[str]] = field(default_factory=list)
    """Two sub-parameters side by side along dimension 0, as a gate and its projection."""
    parts: list[tuple[list[re.Pattern[str]], list[str], Sequence[object], int]] = field(default_factory=list)
    """(patterns, their texts, shape with the sub-parameters' sizes, dimension)."""
    widths: dict[str, list[list[int]]] = field(default_factory=dict)
    """By pattern: of each sub-parameter the size that each rank holds."""
    maps: dict[str, object] = field(default_factory=dict)
    """By pattern: which blocks of the parameter each rank holds. What it says counts before all else."""
    unsupported: list[tuple[re.Pattern[str], str]] = field(default_factory=list)
    """Patterns of parameters that DeepSpeed itself cannot put together, and why."""
    is_stated: bool = False


def read_rules(info: object, where: str, findings: list[Finding]) -> Rules:
    """The rules in `universal_checkpoint_info`; rules that are not stated where there is none."""
    told = table(info)

    def patterns(key: str) -> list[re.Pattern[str]]:
        return [p for text in items(told.get(key)) if (p := compile_pattern(text, where, findings)) is not None]

    rules = Rules(
        patterns("tp_replicated_parameter_patterns"),
        patterns("parameter_to_average_patterns"),
        patterns("parameter_with_row_parallelism_patterns"),
        patterns("parameter_with_2_sub_params_cat_dim_0"),
        is_stated=bool(told),
        maps=table(table(told.get("affine_map")).get("params"))
        if count(table(told.get("affine_map")).get("version")) == VERSION
        else {},
    )
    for entry in items(told.get("parameter_with_sub_params")):
        part = members(entry)
        texts = [t for t in items(part.get("patterns")) if isinstance(t, str)]
        compiled = [p for t in texts if (p := compile_pattern(t, where, findings)) is not None]
        shape = sequence_items(part.get("shape"))
        dim = count(part.get("partition_dim"))
        if shape is not None and dim is not None and dim < len(shape):
            rules.parts.append((compiled, texts, shape, dim))
    for text, reason in table(told.get("autotp_unsupported_parameter_patterns")).items():
        if (pattern := compile_pattern(text, where, findings)) is not None:
            rules.unsupported.append((pattern, str(reason)))
    for text, widths in table(told.get("sub_param_shard_widths")).items():
        rules.widths[text] = [counts(w) for w in items(widths)]
    return rules


def _maps(record: object) -> dict[str, object]:
    """By pattern the affine map of each parameter; none where they are written in a way that is not known."""
    told = table(record)
    return table(told.get("params")) if count(told.get("version")) == VERSION else {}


def compile_pattern(text: object, where: str, findings: list[Finding]) -> re.Pattern[str] | None:
    """A pattern of a checkpoint; one that could take for ever on a name is refused."""
    if not isinstance(text, str):
        return None
    has_nested = re.search(r"[)\]][*+]\??[^)]*\)[*+{]|\)[*+{]", text)
    if len(text) > _MAX_PATTERN or len(_REPEAT.findall(re.sub(r"\\.", "", text))) > _MAX_REPEATS or has_nested:
        expected = f"a pattern of at most {_MAX_PATTERN} characters and {_MAX_REPEATS} repetitions, none of a group"
        findings.append(Finding("pickle-limit", f"`universal_checkpoint_info` in {where}", expected, repr(text[:80])))
        return None
    try:
        return re.compile(text)
    except re.error as e:
        findings.append(Finding("bad-pickle", f"`universal_checkpoint_info` in {where}", "a regular expression", str(e)))
        return None


def find_placement(name: str, shapes: Sequence[tuple[int, ...]], rules: Rules) -> Placement | str:
    """Where the shards of a parameter, with these shapes by rank, lie in it; a text when they do not go together. Pure."""
    first = shapes[0]
    if len(shapes) == 1:
        return Placement(first)
    if len(name) > _MAX_NAME:
        return "a name too long to be matched"
    entry = _map_of(name, rules)
    if entry is not None:
        return read_affine_map(entry, shapes)
    unsupported = next((reason for pattern, reason in rules.unsupported if pattern.match(name)), None)
    if unsupported is not None:
        return Placement(first, apart=unsupported or "not supported")
    if not first or _matches(rules.replicated, name):
        return _replicated(shapes)
    if _matches(rules.averaged, name):
        return _replicated(shapes, may_differ=True)
    if _matches(rules.halves, name):
        return _in_parts(shapes, 0, [[s[0] // 2] * 2 for s in shapes]) if all(s[0] % 2 == 0 for s in shapes) else "odd halves"
    part = next((p for p in rules.parts if _matches(p[0], name)), None)
    if part is not None:
        return _sub_parameters(shapes, *part[1:], rules)
    if rules.is_stated:
        return _side_by_side(shapes, 1 if _matches(rules.row_parallel, name) else 0)
    return _by_usual_names(name, shapes)


def _map_of(name: str, rules: Rules) -> object:
    """The affine map of a parameter: its pattern is its escaped name, as DeepSpeed writes it."""
    return rules.maps.get(f"^{re.escape(name)}$") if rules.maps else None


def _by_usual_names(name: str, shapes: Sequence[tuple[int, ...]]) -> Placement | str:
    """As Megatron-DeepSpeed, BLOOM and GPT-NeoX share parameters of this name."""
    if _ROW_PARALLEL.fullmatch(name):
        return _side_by_side(shapes, 1)
    if _REPLICATED.fullmatch(name):
        return _replicated(shapes)
    return _side_by_side(shapes, 0, is_guessed=not _COLUMN_PARALLEL.fullmatch(name))


def _matches(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(p.match(name) for p in patterns)


def _replicated(shapes: Sequence[tuple[int, ...]], *, may_differ: bool = False) -> Placement | str:
    if len(set(shapes)) > 1:
        return f"shapes {[list(s) for s in shapes[:8]]} of what every rank holds"
    return Placement(shapes[0], may_differ=may_differ)


def _side_by_side(shapes: Sequence[tuple[int, ...]], dim: int, *, is_guessed: bool = False) -> Placement | str:
    if dim >= len(shapes[0]):
        return f"{len(shapes[0])} dimensions, and shards along dimension {dim}"
    found = _in_parts(shapes, dim, [[s[dim] if dim < len(s) else 0] for s in shapes])
    return Placement(found.shape, found.dim, found.cuts, is_guessed=is_guessed) if isinstance(found, Placement) else found


def _sub_parameters(
    shapes: Sequence[tuple[int, ...]], texts: Sequence[str], shape: Sequence[object], dim: int, rules: Rules
) -> Placement | str:
    """Fused parameters: each sub-parameter is cut on its own, so a rank holds a slice of every one of them."""
    stated = next((rules.widths[t] for t in texts if t in rules.widths), None)
    sizes = [count(s) or 0 for s in shape]
    view = _view_of(shapes[0], sizes, dim)
    if view is None:
        return f"{list(shapes[0])}, and sub-parameters along dimension {dim} of {sizes}"
    axis, outer, inner = view
    if any(axis >= len(s) or s[axis] % (outer * inner or 1) for s in shapes):
        return f"shards of {[list(s) for s in shapes[:8]]} along dimension {dim} of {sizes}"
    whole = sum(s[axis] // (outer * inner) for s in shapes)
    if stated is not None:
        widths = [[w[rank] if rank < len(w) else 0 for w in stated] for rank in range(len(shapes))]
    else:
        spec = shape[dim]
        parts = counts(spec) if count(spec) is None else [whole // (count(spec) or 1)] * (count(spec) or 1)
        if not parts or any(n % len(shapes) for n in parts):
            return f"sub-parameters of {parts} along dimension {dim} for {len(shapes)} ranks"
        widths = [[n // len(shapes) for n in parts]] * len(shapes)
    return _in_parts(shapes, axis, widths, outer=outer, inner=inner)


def _view_of(shape: tuple[int, ...], sizes: Sequence[int], dim: int) -> tuple[int, int, int] | None:
    """Which dimension of a shard the sub-parameters' shape views as several, and the sizes before and behind `dim` in it.

    Returns: (dimension of the shard, product of the view's dimensions before `dim` in it, product of those behind).
    """
    if len(sizes) == len(shape):
        return dim, 1, 1
    for axis in range(len(shape)):
        first, last = axis, len(sizes) - (len(shape) - axis)
        if first <= dim <= last and all(_agree(a, b) for a, b in zip(shape[:axis], sizes[:first], strict=True)):
            around = [*sizes[first:dim], *sizes[dim + 1 : last + 1]]
            if all(around) and prod(sizes[first:dim]) <= _MAX_OUTER:
                return axis, prod(sizes[first:dim]), prod(sizes[dim + 1 : last + 1])
    return None


def _agree(size: int, stated: int) -> bool:
    return stated in (0, size)  # 0: left open, or a list


def _in_parts(
    shapes: Sequence[tuple[int, ...]], dim: int, widths: Sequence[Sequence[int]], *, outer: int = 1, inner: int = 1
) -> Placement | str:
    """Shards that hold a slice of each of several sub-parameters, which follow one another along `dim`.

    Args: outer, inner: how often that is so along `dim`, and how many of its elements are one step of a sub-parameter.
    """
    others = {(*s[:dim], *s[dim + 1 :]) for s in shapes}
    if len(others) > 1 or any(sum(w) * outer * inner != s[dim] for w, s in zip(widths, shapes, strict=True)):
        return f"shards of {[list(s) for s in shapes[:8]]} along dimension {dim}"
    totals = [sum(rank[part] for rank in widths) for part in range(len(widths[0]))]
    cuts, done = [], [0] * len(totals)
    for rank in widths:
        local, own = 0, []
        for part, size in enumerate(rank):
            own.append(Cut(local, sum(totals[:part]) + done[part], size))
            local += size
            done[part] += size
        steps = [(o * sum(rank), o * sum(totals)) for o in range(outer)]
        cuts.append(
            tuple(Cut((a + c.local_offset) * inner, (b + c.offset) * inner, c.size * inner) for a, b in steps for c in own)
        )
    return Placement((*shapes[0][:dim], sum(totals) * outer * inner, *shapes[0][dim + 1 :]), dim, tuple(cuts))


def apart_finding(name: str, reason: str, where: str) -> Finding:
    """The warning for a parameter whose shards stay apart."""
    expected = "a description of its shards that DeepSpeed itself can put together"
    return Finding("placement-unstated", f"`{name}` in {where}", expected, f"one tensor per rank: {reason}", severity=WARNING)


def guess_finding(names: Sequence[str], where: str) -> Finding:
    """The warning for parameters whose placement nothing states."""
    found = f"{len(names)} parameters taken as shards along dimension 0: {', '.join(names[:6])}"
    expected = "`universal_checkpoint_info`, or names that are known"
    return Finding("placement-unstated", where, expected, found, severity=WARNING)


__all__ = ["Mapping", "Placement", "Rules", "find_placement", "guess_finding", "read_rules"]
