"""What each stored tensor of a chunk is a part of: which whole tensors, by which rule, and where in them.

One stored tensor may hold several whole ones' shares (all local experts in one matrix), each seen as a strided view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.containers.parts import StoredTensor
from ckpttools.layouts.megatron_legacy.arguments import Arguments
from ckpttools.layouts.megatron_legacy.cuts import Share, share
from ckpttools.layouts.megatron_legacy.names import Parallel
from ckpttools.layouts.megatron_legacy.numbering import LayerName, Numbering, parse_layer
from ckpttools.layouts.megatron_legacy.rules import (
    EMBEDDING,
    FUSED_MODULE,
    GROUPED_WEIGHT,
    LOCAL_EXPERT,
    LOCAL_NAMES,
    NUMBERED_WEIGHT,
    REPLICATED,
    TIED_OUTPUTS,
    Rule,
    find_rule,
)
from ckpttools.layouts.megatron_legacy.shards import Chunk

Shapes = Mapping[str, StoredTensor]


class UnresolvedError(Exception):
    """A tensor that cannot be placed; `code`, `expected` and `found` are a finding's."""

    def __init__(self, code: str, expected: str, found: str) -> None:
        super().__init__(expected)
        self.code, self.expected, self.found = code, expected, found


@dataclass(frozen=True, slots=True)
class Target:
    """One whole tensor of which a stored one holds a share."""

    name: str
    """With global layer and expert numbers."""
    rule: Rule
    share: Share
    view: tuple[int, tuple[int, ...], tuple[int, ...] | None] | None = None
    """(offset in elements, shape, strides) of the share in the stored tensor; None when it is all of it, as it is."""

    def of(self, stored: StoredTensor) -> StoredTensor:
        """The share in a stored tensor (the weight, or a state of the optimizer of the same shape)."""
        return stored if self.view is None else stored.view(self.view[1], self.view[2], self.view[0])


class Resolver:
    """Places the tensors of one chunk."""

    def __init__(self, chunk: Chunk, numbering: Numbering, mesh: Parallel, arguments: Arguments, version: float) -> None:
        self._chunk = chunk
        self._numbering = numbering
        self._mesh = mesh
        self._arguments = arguments
        self._version = version
        self._experts_here: dict[str, int] = {}

    def resolve(self, name: str, stored: StoredTensor) -> list[Target]:
        """The whole tensors that a stored one is part of. Raises UnresolvedError."""
        tied = next((end for end in TIED_OUTPUTS if name == end or name.endswith(f".{end}")), None)
        if tied is not None and (tied == TIED_OUTPUTS[1] or self._arguments.is_tied):
            prefix = name.removesuffix(tied) + ("language_model." if tied == TIED_OUTPUTS[1] else "")
            return self._plain(f"{prefix}{EMBEDDING}", f"{prefix}{EMBEDDING}", stored)
        grouped = GROUPED_WEIGHT.fullmatch(name)
        if grouped:
            return self._grouped(grouped["module"], grouped["which"], stored)
        numbered = NUMBERED_WEIGHT.fullmatch(name)
        if numbered:
            name = f"{numbered['module']}.local_experts.{numbered['expert']}.{numbered['linear']}.{numbered['what']}"
        return self._plain(name, name, stored)

    def rename(self, name: str) -> str:
        """A name with global layer and expert numbers, and the norms called as in sharded checkpoints."""
        name = self._global_expert(name)
        layer = parse_layer(name)
        if layer is None:
            return name
        rest = layer.rest
        if f"{layer.layers}.{layer.number}.{FUSED_MODULE}" in self._chunk.tensors:
            rest = next((p.sub(new, rest) for p, new in LOCAL_NAMES if p.fullmatch(rest) and self._is_local(layer)), rest)
        return f"{layer.layers}.{self._numbering.number(layer.layers, self._chunk, layer.number)}.{rest}"

    def _is_local(self, layer: LayerName) -> bool:
        """Whether a layer was built without Transformer Engine, which fuses the norms into the next linear layer."""
        return f"{layer.layers}.{layer.number}.input_layernorm.weight" in self._chunk.tensors

    def _global_expert(self, name: str) -> str:
        match = LOCAL_EXPERT.fullmatch(name)
        if match is None:
            return name
        number = self._chunk.place.ep * self._local_experts(match["module"]) + int(match["expert"])
        return f"{match['module']}.local_experts.{number}.{match['rest']}"

    def _local_experts(self, module: str) -> int:
        """How many experts of a layer this rank holds, counted from its tensors."""
        if module not in self._experts_here:
            numbers = {0}
            for name in self._chunk.tensors:
                if name.startswith(f"{module}."):
                    match = LOCAL_EXPERT.fullmatch(name) or NUMBERED_WEIGHT.fullmatch(name)
                    numbers |= {int(match["expert"]) + 1} if match else set()
            self._experts_here[module] = max(numbers)
        return self._experts_here[module]

    def _grouped(self, module: str, which: str, stored: StoredTensor) -> list[Target]:
        """All local experts in one matrix: each expert's share is a transposed view of a part of it."""
        experts = self._grouped_experts(module)
        if len(stored.shape) != 2 or not stored.is_dense:
            raise UnresolvedError("rank-mismatch", "a dense matrix of all local experts", f"{list(stored.shape)}")
        long_dim = 1 if which == "weight1" else 0
        hidden, together = stored.shape[1 - long_dim], stored.shape[long_dim]
        if together % experts:
            raise UnresolvedError("arguments-mismatch", f"a multiple of {experts} local experts", f"{together} rows")
        each = together // experts
        shape, strides = ((each, hidden), (1, each)) if which == "weight1" else ((hidden, each), (1, hidden))
        linear = "linear_fc1" if which == "weight1" else "linear_fc2"
        targets = []
        for expert in range(experts):
            number = self._chunk.place.ep * experts + expert
            name = f"{module}.local_experts.{number}.{linear}.weight"
            rule = self._rule(name)
            blocks = (each // 2, each // 2) if which == "weight1" and self._is_grouped_gated(module, each) else (each,)
            cut = self._share(shape, rule, blocks, name)
            targets.append(Target(self._global_layer(name), rule, cut, (expert * each * hidden, shape, strides)))
        return targets

    def _grouped_experts(self, module: str) -> int:
        """Local experts of a layer that keeps them in one matrix: its router has a row for each expert."""
        router = self._chunk.tensors.get(f"{module.removesuffix('.experts')}.router.weight")
        total = router.shape[0] if router and router.shape else self._arguments.experts
        if total is None:
            raise UnresolvedError("arguments-mismatch", "`num_experts` in the arguments, or a router", "neither")
        if total % self._mesh.ep:
            raise UnresolvedError("arguments-mismatch", f"experts that {self._mesh.ep} expert ranks divide", f"{total} experts")
        return total // self._mesh.ep

    def _is_grouped_gated(self, module: str, rows: int) -> bool:
        other = self._chunk.tensors.get(f"{module}.weight2")
        columns = other.shape[0] // self._grouped_experts(module) if other and len(other.shape) == 2 else 0
        return self._is_gated(rows, columns, module)

    def _plain(self, name: str, rule_name: str, stored: StoredTensor) -> list[Target]:
        rule = self._rule(rule_name)
        cut = self._share(stored.shape, rule, self._blocks(name, rule, stored), name)
        return [Target(self.rename(name), rule, cut)]

    def _rule(self, name: str) -> Rule:
        rule = find_rule(name, self._version)
        if rule is not None:
            return rule
        if self._ranks(name) == 1:
            return Rule(name, REPLICATED)
        raise UnresolvedError("no-rule", f"a rule for how {self._ranks(name)} tensor-parallel ranks hold it", "none")

    def _ranks(self, name: str) -> int:
        return self._mesh.etp if ".experts." in name or ".local_experts." in name else self._mesh.tp

    def _global_layer(self, name: str) -> str:
        layer = parse_layer(name)
        if layer is None:
            return name
        return f"{layer.layers}.{self._numbering.number(layer.layers, self._chunk, layer.number)}.{layer.rest}"

    def _share(self, shape: tuple[int, ...], rule: Rule, blocks: tuple[int, ...], name: str) -> Share:
        ranks = self._ranks(name)
        dim = rule.dim
        if dim is not None and dim >= len(shape):
            raise UnresolvedError("rank-mismatch", f"a tensor of more than {dim} dimensions", f"{list(shape)}")
        if dim is not None and rule.whole and self._is_whole(rule.whole, shape[dim]):
            dim = None
        return share(shape, dim, blocks, self._chunk.place.tp % ranks, ranks)

    def _is_whole(self, sizes: str, length: int) -> bool:
        numbers = [self._arguments.number(name) for name in sizes.split("+")]
        return None not in numbers and sum(n for n in numbers if n is not None) == length

    def _blocks(self, name: str, rule: Rule, stored: StoredTensor) -> tuple[int, ...]:
        """Sizes of the blocks of a share along the dimension that is cut."""
        if rule.dim is None or rule.dim >= len(stored.shape):
            return ()
        length = stored.shape[rule.dim]
        if rule.blocks == "gated":
            return self._halves(length) if self._is_gated(length, self._columns(name), name) else (length,)
        if rule.blocks == "equal":
            if length % len(rule.fused):
                raise UnresolvedError("rank-mismatch", f"rows in {len(rule.fused)} equal blocks", f"{length} rows")
            return (length // len(rule.fused),) * len(rule.fused)
        if rule.blocks == "mamba":
            return self._mamba(rule, length)
        return (length,)

    def _halves(self, length: int) -> tuple[int, ...]:
        return (length // 2, length // 2)

    def _columns(self, name: str) -> int:
        """Input features of the linear layer that follows a first one; 0 where it is not there."""
        module = name.rpartition(".")[0]
        pairs = (("dense_h_to_4h", "dense_4h_to_h"), ("linear_fc1", "linear_fc2"))
        first, second = next((p for p in pairs if module.endswith(p[0])), pairs[1])
        follower = f"{module.removesuffix(first)}{second}.weight"
        stored = self._chunk.tensors.get(follower)
        if stored is None:
            match = LOCAL_EXPERT.fullmatch(follower)  # stored as `linear_fc2.weight3`
            if match:
                linear, _, what = match["rest"].rpartition(".")
                stored = self._chunk.tensors.get(f"{match['module']}.{linear}.{what}{match['expert']}")
        return stored.shape[1] if stored is not None and len(stored.shape) == 2 else 0

    def _is_gated(self, rows: int, columns: int, name: str) -> bool:
        """Whether a first linear layer holds a gate beside it: then it has twice the rows that the second has columns."""
        stated = self._arguments.flag("swiglu", "gated_linear_unit", "geglu", "quick_geglu")
        if not columns:
            return stated is True and rows % 2 == 0
        if rows not in (columns, 2 * columns):
            raise UnresolvedError("arguments-mismatch", f"{columns} or {2 * columns} rows before {columns} columns", f"{rows}")
        return rows == 2 * columns

    def _mamba(self, rule: Rule, length: int) -> tuple[int, ...]:
        """The blocks of a state space layer's input projection or convolution, from the arguments."""
        heads_dim, state = self._arguments.number("mamba_head_dim") or 64, self._arguments.number("mamba_state_dim") or 128
        groups = self._arguments.number("mamba_num_groups") or 8
        stated = self._arguments.number("mamba_num_heads")
        hidden = self._arguments.number("hidden_size")
        heads = stated or (2 * hidden // heads_dim if hidden else 0)
        inner = heads * heads_dim // self._mesh.tp
        group = groups * state // self._mesh.tp
        sizes = {"z": inner, "x": inner, "B": group, "C": group, "dt": heads // self._mesh.tp}
        blocks = tuple(sizes[name] for name in rule.fused)
        if sum(blocks) != length:
            expected = f"{sum(blocks)} rows: {heads} heads of {heads_dim}, {groups} groups of {state} over {self._mesh.tp} ranks"
            raise UnresolvedError("arguments-mismatch", expected, f"{length} rows")
        return blocks


__all__ = ["Resolver", "Target", "UnresolvedError"]
