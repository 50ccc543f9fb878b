"""From tensors, a mesh and rules to a placement of each tensor, with the reason; and what does not fit the mesh.

`place` decides; nothing is written and nothing raised, so that all problems can be told at once (`require_fit` raises them).
Optimizer state goes with its parameter; what no rule names is replicated, but for the rows that FSDP cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckpttools.errors import UsageError
from ckpttools.model import Mesh, Path, TensorSpec
from ckpttools.placement.counts import Counts
from ckpttools.placement.cutting import Cutting, cut_of, require_even
from ckpttools.placement.fit import MAX_RANKS, Constraint, Problem, Requirements, nearest_mesh
from ckpttools.placement.follow import parameters_of_state
from ckpttools.placement.local import Cut, PlacedTensor, Placement, canonical_mesh
from ckpttools.placement.rule_files import built_in
from ckpttools.placement.rules import Rule, RuleSet
from ckpttools.placement.stages import StagePlan, expert_ranks, plan_stages

HeldAt = tuple[tuple[str, tuple[int, ...]], ...]
"""(axis, coordinates along it) at which a tensor is, as `Placement` has it."""
TensorPlace = tuple[TensorSpec, Path, str]
"""An output tensor: its spec, the typed keys that lead to it, and its family."""
MODEL, OPTIMIZER = "model", "optimizer"
_MOMENTS = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_diff", "exp_inf", "neg_pre_grad", "momentum_buffer", "momentum"),
        *("square_avg", "grad_avg", "acc_delta", "sum", "prev", "step_size", "ax", "z", "fp32", "fp32_param", "master_param"),
    }
)
"""Words in names of state that has the shape of its parameter."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """A tensor's placement and where it comes from."""

    tensor: PlacedTensor
    reason: str
    """For people: `tp dim 0 by rule 1 of llama; fsdp dim 0`."""


@dataclass(frozen=True)
class Assignment:
    """Where every tensor goes on a mesh."""

    mesh: Mesh
    """In the order in which ranks are numbered."""
    rules: RuleSet
    assigned: tuple[Assigned, ...] = ()
    """In the order of the tensors given; empty for a mesh that cannot be."""
    problems: tuple[Problem, ...] = ()
    nearest: Mesh | None = None
    """The nearest mesh that fits, where this one does not and there is one."""

    @property
    def tensors(self) -> tuple[PlacedTensor, ...]:
        """The placed tensors, without the reasons."""
        return tuple(found.tensor for found in self.assigned)


def require_fit(
    assignment: Assignment, asked: Mesh | None = None, stated: Callable[[Mesh], Mesh] = lambda nearest: nearest
) -> None:
    """Raises UsageError with every problem of an assignment that has any, and the nearest mesh that would fit.

    Args: asked: the mesh in the terms of who asked for it; the assignment's unless given. stated: puts the nearest in them.
    """
    if not assignment.problems:
        return
    nearest = None if assignment.nearest is None else stated(assignment.nearest)
    hints = [] if nearest is None else [f"the nearest mesh that fits: --mesh {str(nearest) or 'dp=1'}"]
    if any("no rule" in problem.message for problem in assignment.problems):
        hints.append("give rules for these names: --placements FILE (docs/reference/placement-rules.md)")
    if any("needs the number of" in problem.message for problem in assignment.problems):
        hints.append("give the model's config: --model-config FILE")
    details = "\n  ".join(str(problem) for problem in assignment.problems)
    raise UsageError(f"the mesh {asked or assignment.mesh} does not fit this checkpoint:\n  {details}", hints=hints)


def place(
    tensors: Sequence[TensorPlace],
    mesh: Mesh,
    rules: RuleSet | None = None,
    counts: Counts | None = None,
    *,
    is_even: bool = False,
    copies_heads: bool = False,
    layers_per_stage: Sequence[int] = (),
    virtual_stages: int = 1,
    held: Mapping[str, HeldAt] | None = None,
) -> Assignment:
    """Where every tensor goes on a mesh, why, and what does not fit. Pure.

    Args:
        tensors: in the order of the model, as far as one is known.
        rules: None for no more than the built-in buffers: FSDP and replicas, no tensor parallelism.
        counts: of heads and experts, as the model's config has them.
        is_even: whether every rank's share must be of equal shape, as plain local tensors need it; otherwise shares are as
            torch.chunk makes them, but whole heads wherever rules count in heads.
        copies_heads: whether neighbours may hold the same head of keys and values where there are fewer of these than ranks.
        layers_per_stage: layers of each pipeline stage; empty for equal blocks.
        virtual_stages: blocks of layers that each stage holds, dealt out in turn: stage 0 of 2 holds the first and the third.
        held: what is known of names already: (axis, places along it) at which each is; then stages and experts are not asked.
    """
    rules = rules or built_in("buffers")
    problem = _problem_of_mesh(mesh)
    if problem is not None:
        return Assignment(mesh, rules, problems=(problem,))
    mesh = canonical_mesh(mesh)
    cutting = Cutting(counts or Counts(), Requirements(), copies_heads)
    placer = _Placer(tensors, mesh, rules, cutting, is_even, tuple(layers_per_stage), virtual_stages, held or {})
    assigned = placer.assign()
    problems = tuple(placer.requirements.problems(mesh))
    nearest = nearest_mesh(mesh, placer.requirements.constraints) if problems and not placer.requirements.faults else None
    return Assignment(mesh, rules, tuple(assigned), problems, nearest)


def _problem_of_mesh(mesh: Mesh) -> Problem | None:
    """What is wrong with a mesh whatever the tensors are."""
    try:
        canonical_mesh(mesh)
    except ValueError as error:
        return Problem(str(error))
    if mesh.ranks > MAX_RANKS:
        return Problem("the mesh has too many ranks", f"at most {MAX_RANKS}", str(mesh.ranks))
    return None


@dataclass
class _Placer:
    """The work of `place`: what it was asked, and what it finds on the way."""

    tensors: Sequence[TensorPlace]
    mesh: Mesh
    rules: RuleSet
    cutting: Cutting
    is_even: bool
    layers_per_stage: tuple[int, ...]
    virtual_stages: int
    held: Mapping[str, HeldAt]
    used: set[str] = field(default_factory=set)
    """Axes along which something is cut or divided."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.axes)

    @property
    def requirements(self) -> Requirements:
        return self.cutting.requirements

    @cached_property
    def parameters(self) -> list[TensorSpec]:
        return [spec for spec, _, family in self.tensors if family == MODEL]

    @cached_property
    def stages(self) -> StagePlan | None:
        if any(axis == "pp" for places in self.held.values() for axis, _ in places):
            self.used.add("pp")
            return None
        if "pp" not in self.sizes:
            if self.layers_per_stage:
                self.requirements.fault("layers per stage are given, and the mesh has no stages", "an axis pp")
            return None
        names = [spec.name for spec in self.parameters]
        self.used |= {"pp"} if any(self.rules.layer_of(name) is not None for name in names) else set()
        blocks = self.sizes["pp"] * self.virtual_stages
        return plan_stages(names, self.rules, blocks, self.layers_per_stage, self.requirements)

    @cached_property
    def expert_places(self) -> list[int]:
        """Per expert with a name of its own: its place along `ep`."""
        if any(axis == "ep" for places in self.held.values() for axis, _ in places):
            self.used.add("ep")
            return []
        if "ep" not in self.sizes or not self.rules.experts:
            return []
        numbered = [(number, s.name) for s in self.parameters if (number := self.rules.expert_of(s.name)) is not None]
        count = max((number for number, _ in numbered), default=-1) + 1
        if count:
            self.used.add("ep")
        for _, name in numbered:
            self.requirements.ask(Constraint(("ep",), count, "experts"), name)
        return expert_ranks(count, self.sizes["ep"])

    def assign(self) -> list[Assigned]:
        placed = {spec.name: self.parameter(spec, spec.name) for spec in self.parameters}
        state = [(spec, path) for spec, path, family in self.tensors if family != MODEL]
        owners = iter(parameters_of_state(state, self.parameters, self.orders()))
        found = []
        for spec, path, family in self.tensors:
            if family == MODEL:
                placement, reason = placed[spec.name]
            else:
                owner = next(owners)
                placement, reason = self.state(spec, family, owner, placed[owner.name] if owner else None)
            found.append(Assigned(PlacedTensor(spec, path, family, placement), reason))
        self._require_use()
        return found

    def orders(self) -> list[list[TensorSpec]]:
        """In which an optimizer may have numbered the parameters: as they are, or as the rules name them layer by layer (a
        safetensors file sorts names); each with and without heads that are tied, and with matrices before vectors, as
        optimizers with two groups (with and without weight decay) have them."""
        cut = [spec for spec in self.parameters if not self._is_whole(spec)]
        heads = [head for _, head in self.rules.stages.tied_expressions]
        found = []
        for order in (cut, sorted(cut, key=lambda spec: self.rules.order_of(spec.name))):
            for part in (order, [spec for spec in order if not any(head.fullmatch(spec.name) for head in heads)]):
                found += [part, sorted(part, key=lambda spec: len(spec.shape) < 2)]
        return found

    def _is_whole(self, spec: TensorSpec) -> bool:
        matching = self.rules.matching(spec.name)
        return bool(matching and not matching[0].axis) or _cannot_be_cut(spec) != ""

    def parameter(self, spec: TensorSpec, name: str) -> tuple[Placement, str]:
        """Placement and reason of a parameter; `name` is the one that rules are asked for."""
        held, said = self._held_at(name)
        matching = self.rules.matching(name)
        whole = matching[0] if matching and not matching[0].axis else None
        cuts: list[Cut] = []
        if spec.shape == ():
            said.append("no dimension to cut: replicated")
        elif spec.dtype.is_sub_byte:
            said.append(f"{spec.dtype.name}, of which several elements share a byte: replicated")
        elif whole is not None:
            said.append(f"{whole.label}: replicated")
        else:
            self._cut(spec, matching, cuts, said)
        if self.is_even:
            require_even(spec, cuts, self.sizes, self.requirements)
        return Placement(tuple(cuts), held), "; ".join(said) or "replicated"

    def _cut(self, spec: TensorSpec, matching: Sequence[Rule], cuts: list[Cut], said: list[str]) -> None:
        """Enters the cuts of a tensor: stacked layers, experts, then tensor parallelism, then rows."""
        for axis in ("pp", "ep", "tp"):
            rule = next((rule for rule in matching if rule.axis == axis), None)
            if axis not in self.sizes:
                continue
            cut = cut_of(spec, rule, cuts, self.sizes[axis], self.cutting) if rule is not None else None
            self.used |= {axis} if rule is not None else set()
            if cut is not None and rule is not None:
                cuts.append(cut)
                said.append(f"{axis} dim {cut.dim}{_sections(cut)} by {rule.label}")
            elif axis == "tp":
                said.append("no rule: replicated on tp")
        if "fsdp" in self.sizes:
            self._cut_rows(spec, matching, cuts, said)

    def _cut_rows(self, spec: TensorSpec, matching: Sequence[Rule], cuts: list[Cut], said: list[str]) -> None:
        rule = next((rule for rule in matching if rule.axis == "fsdp"), None)
        whole = _cannot_be_cut(spec)
        if rule is not None:
            cut = cut_of(spec, rule, cuts, self.sizes["fsdp"], self.cutting)
            cuts += [cut] if cut is not None else []
            said.append(f"fsdp dim {rule.dim} by {rule.label}")
        elif whole and not cuts:
            said.append(f"{whole}: replicated")
        else:
            cuts.append(Cut("fsdp", 0))
            said.append("fsdp dim 0")

    def _held_at(self, name: str) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], list[str]]:
        held: list[tuple[str, tuple[int, ...]]] = list(self.held.get(name, ()))
        said = [f"{axis} {','.join(map(str, places))}, as the checkpoint tells" for axis, places in held]
        if self.stages is not None:
            stages, why = self.stages.stages_of(name)
            stages = tuple(dict.fromkeys(block % self.sizes["pp"] for block in stages))
            held += [("pp", stages)] if stages and self.sizes["pp"] > 1 else []
            said += [why] if why else []
        places = self.expert_places
        number = self.rules.expert_of(name) if places else None
        if number is not None and number < len(places):
            held.append(("ep", (places[number],)))
            said.append(f"expert {number}: ep rank {places[number]}")
        return tuple(held), said

    def state(
        self, spec: TensorSpec, family: str, owner: TensorSpec | None, placed: tuple[Placement, str] | None
    ) -> tuple[Placement, str]:
        """Placement and reason of a tensor that is none of the model's."""
        if owner is not None and placed is not None:
            if owner.shape == spec.shape:
                return placed[0], f"as `{owner.name}`: {placed[1]}"
            held = placed[0].held_at
            cuts = self._rows_of_state(spec)
            return Placement(cuts, held), f"of `{owner.name}`, in another shape: " + ("fsdp dim 0" if cuts else "replicated")
        if family != OPTIMIZER:
            return Placement(), "not the model's: replicated"
        name = _parameter_in(spec.name)
        if name and (self.rules.matching(name) or name in self.held):
            return self.parameter(spec, name)
        cuts = self._rows_of_state(spec)
        return Placement(cuts), "optimizer state of no known parameter: " + ("fsdp dim 0" if cuts else "replicated")

    def _rows_of_state(self, spec: TensorSpec) -> tuple[Cut, ...]:
        if "fsdp" not in self.sizes or _cannot_be_cut(spec) or spec.volume == 1:
            return ()
        cuts = (Cut("fsdp", 0),)
        if self.is_even:
            require_even(spec, cuts, self.sizes, self.requirements)
        return cuts

    def _require_use(self) -> None:
        """Refuses an axis that divides nothing: every rank along it would hold the same, which nobody means."""
        what = {
            "tp": "no rule cuts a tensor of these names along tp",
            "ep": "no rule says which tensors are experts",
            "pp": "no rule says which tensors are layers, so there is nothing to divide into stages",
        }
        for axis, why in what.items():
            if axis in self.sizes and axis not in self.used:
                self.requirements.ask(Constraint((axis,), 1, "ranks", is_limit=True, why=why))


def _parameter_in(name: str) -> str:
    """What is left of a name of state when the word for a moment is taken off either end (Megatron has it in front)."""
    front, _, last = name.rpartition(".")
    if last in _MOMENTS:
        return front
    words = name.split(".")
    place = next((i for i, word in enumerate(words[:4]) if word in _MOMENTS), None)
    return "" if place is None else ".".join(words[place + 1 :])


def _cannot_be_cut(spec: TensorSpec) -> str:
    """Why FSDP leaves a tensor whole; empty where it cuts it."""
    if spec.shape == ():
        return "no dimension to cut"
    if spec.dtype.is_sub_byte or spec.dtype.kind not in ("float", "complex"):
        return f"{spec.dtype.name}, no parameter"
    return ""


def _sections(cut: Cut) -> str:
    sections = f" in sections {'+'.join(map(str, cut.sections))}" if cut.sections else ""
    most = max(cut.copies, default=1)
    return sections + (f", each head of keys and values on {most} ranks" if most > 1 else "")
