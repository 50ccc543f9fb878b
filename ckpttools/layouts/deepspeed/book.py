"""Collects what each rank holds of each tensor, and puts the tensor-parallel shards together. Start with `Book.entries`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from ckpttools.dtypes import DType
from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.parts import Key, Local, Placement, place, whole_piece
from ckpttools.layouts.deepspeed.states import Stored
from ckpttools.layouts.deepspeed.tensor_parallel import Rules, apart_finding, find_placement, guess_finding
from ckpttools.layouts.families import MODEL, OPTIMIZER
from ckpttools.model import ObjectEntry, Path, Piece, TensorEntry, TensorSpec, render_path

_MAX_NAMED = 64

WEIGHT: Key = ()
MASTER: Key = ("fp32",)
FLAT_STATES = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "sum", "square_avg"})
"""What common optimizers keep per element: any other number of elements is a finding."""


@dataclass(slots=True)
class Book:
    """What was found so far."""

    tp: int
    rules: Rules
    findings: list[Finding]
    buffers: set[str] = field(default_factory=set)
    shared: dict[str, str] = field(default_factory=dict)
    """Further name of a tied parameter -> the name under which its state is kept."""
    has_all_ties: bool = True
    """Whether the files list every further name, and can be believed."""
    objects: dict[Path, ObjectEntry] = field(default_factory=dict)
    layers: dict[int, str] = field(default_factory=dict)
    """Number of each layer of a pipeline that has a file -> what its names begin with."""
    orders: dict[int, list[list[str]]] = field(default_factory=dict)
    """Pipeline stage -> the parameters of each group, where the optimizer counts them (ZeRO off)."""
    _shards: dict[tuple[str, Key], dict[int, Local]] = field(default_factory=dict)
    _merged: set[tuple[str, Key]] = field(default_factory=set)
    _settled: set[tuple[str, Key]] = field(default_factory=set)

    def names(self, key: Key) -> list[str]:
        """The parameters that have something under a key."""
        return [name for name, k in self._shards if k == key]

    def holds(self, name: str, key: Key) -> bool:
        """Whether something was found of a parameter under a key."""
        return (name, key) in self._shards

    def settle(self) -> None:
        """Take what was found so far as what counts: more of the same, from a later pipeline stage, is a copy."""
        self._settled.update(self._shards)

    def is_settled(self, name: str, key: Key) -> bool:
        """Whether an earlier pipeline stage holds it."""
        return (name, key) in self._settled

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a weight's shard on the first rank that holds it."""
        shards = self._shards.get((name, WEIGHT))
        return next(iter(shards.values())).shape if shards else None

    def stored(self, name: str, tp: int) -> Stored | None:
        """A weight's shard, where it is stored in one piece."""
        local = self._shards.get((name, WEIGHT), {}).get(tp)
        if local is None or len(local.pieces) != 1 or local.pieces[0].box.sizes != local.shape:
            return None
        return Stored(local.dtype, local.shape, local.pieces[0].extent)

    def add(self, name: str, key: Key, tp: int, dtype: DType, shape: tuple[int, ...], pieces: list[Piece], where: str) -> None:
        """Pieces that lie in a tensor-parallel rank's shard."""
        local = self._local(name, key, tp, dtype, shape, where)
        if local is not None:
            local.pieces += pieces

    def add_stale(
        self, name: str, key: Key, tp: int, dtype: DType, shape: tuple[int, ...], pieces: list[Piece], where: str
    ) -> None:
        """Copies of it that nothing reads when training resumes: of a later pipeline stage, of another rank."""
        local = self._local(name, key, tp, dtype, shape, where)
        if local is not None:
            local.stale += pieces

    def add_whole(self, name: str, key: Key, tp: int, stored: Stored, rank: int, where: str, *, is_stale: bool = False) -> None:
        """A shard in one piece; a further one of the same is a copy."""
        piece = whole_piece(stored.shape, stored.extent, rank)
        has = bool(self._shards.get((name, key), {}).get(tp))
        add = self.add_stale if is_stale or has else self.add
        add(name, key, tp, stored.dtype, stored.shape, [piece], where)

    def add_apart(self, name: str, key: Key, stored: Stored, rank: int, where: str) -> None:
        """What is kept as it is stored, under a name of its own: no parameter's shard, as far as can be told."""
        piece = whole_piece(stored.shape, stored.extent, rank)
        self.add_merged(name, key, stored.dtype, stored.shape, [piece], where)

    def add_merged(self, name: str, key: Key, dtype: DType, shape: tuple[int, ...], pieces: list[Piece], where: str) -> None:
        """A tensor that is whole already, whatever the number of ranks."""
        self._merged.add((name, key))
        self.add(name, key, 0, dtype, shape, pieces, where)

    def alias(self, name: str, kept: str) -> None:
        """A further name for a weight."""
        self._shards[name, WEIGHT] = self._shards[kept, WEIGHT]
        if (kept, WEIGHT) in self._merged:
            self._merged.add((name, WEIGHT))

    def add_object(self, path: Path, kind: str, record: object, family: str) -> None:
        """A value that is no tensor, from the first file that has it."""
        self.objects.setdefault(path, ObjectEntry(render_path(path), path, kind, record, family=family))

    def _local(self, name: str, key: Key, tp: int, dtype: DType, shape: tuple[int, ...], where: str) -> Local | None:
        shards = self._shards.get((name, key))
        if shards is None:
            shards = self._shards[name, key] = {}
        local = shards.get(tp)
        if local is None:
            local = shards[tp] = Local(dtype, shape, where)
        if (local.dtype, local.shape) != (dtype, shape):
            expected = f"{local.dtype} {list(local.shape)} as in {local.where}"
            self.findings.append(Finding("rank-mismatch", f"{name} in {where}", expected, f"{dtype} {list(shape)}"))
            return None
        return local

    def entries(self) -> list[TensorEntry]:
        """Every tensor: weights first, each with the boxes of all its shards."""
        placements: dict[tuple[str, tuple[tuple[int, ...], ...]], Placement | str] = {}
        guessed: dict[str, str] = {}
        apart: dict[str, tuple[str, str]] = {}
        found = []
        for (name, key), shards in sorted(self._shards.items(), key=lambda item: item[0][1] != WEIGHT):
            first = next(iter(shards.values()))
            of_weight = self._shards.get((name, WEIGHT), {})  # a shard without elements has no place in a flat vector
            shapes = tuple((shards.get(t) or of_weight.get(t) or first).shape for t in range(self.tp))
            if name in self.buffers or (name, key) in self._merged:
                shapes = (first.shape,)
            elif first.shape == ():
                shapes, shards = ((),), {0: first}
            placement = placements.get((name, shapes))
            if placement is None:
                placement = find_placement(self.shared.get(name, name), shapes, self.rules)
                placements[name, shapes] = placement
                if isinstance(placement, str):
                    expected = "shards that make one tensor"
                    self.findings.append(Finding("rank-mismatch", f"{name} in {first.where}", expected, placement))
                elif placement.is_guessed:
                    guessed[name] = first.where
            if isinstance(placement, Placement) and placement.apart:
                apart[name] = (placement.apart, first.where)
                found += [self._entry(f"{name}.tp_{t}", key, {t: s}, Placement(s.shape)) for t, s in sorted(shards.items())]
            elif isinstance(placement, Placement):
                found.append(self._entry(name, key, shards, placement))
        self.findings += [apart_finding(name, *told) for name, told in islice(apart.items(), _MAX_NAMED)]
        if guessed:
            self.findings.append(guess_finding(list(guessed), next(iter(guessed.values()))))
        return found

    def _entry(self, name: str, key: Key, shards: dict[int, Local], placement: Placement) -> TensorEntry:
        first = next(iter(shards.values()))
        path: Path = ("optimizer", "state", name, *key) if key else (name,)
        pieces: list[Piece] = []
        replicas: list[Piece] = []
        stale: list[Piece] = []
        for t, local in sorted(shards.items()):
            if local.dtype != first.dtype:
                expected, found = f"{first.dtype} as in {first.where}", f"{local.dtype}"
                self.findings.append(Finding("rank-mismatch", f"{name} in {local.where}", expected, found))
            elif not placement.cuts:
                copies = stale if placement.may_differ or name in self.buffers else replicas
                (copies if pieces else pieces).extend(local.pieces)
                replicas += local.replicas
                stale += local.stale
            else:
                cuts = placement.cuts[t]
                pieces += [part for p in local.pieces for part in place(p, placement.dim, cuts, local.dtype)]
                copies_of = placement.copies[t] if placement.copies else ()
                replicas += [part for p in local.pieces for part in place(p, placement.dim, copies_of, local.dtype)]
                replicas += [part for p in local.replicas for part in place(p, placement.dim, cuts, local.dtype)]
                stale += [part for p in local.stale for part in place(p, placement.dim, cuts, local.dtype)]
        return TensorEntry(
            TensorSpec(render_path(path), first.dtype, placement.shape),
            path,
            tuple(pieces),
            tuple(replicas),
            family=OPTIMIZER if key else MODEL,
            stale_copies=tuple(stale),
        )


def with_masters(entries: Iterable[TensorEntry], shared: Mapping[str, str], buffers: Collection[str]) -> list[TensorEntry]:
    """The weights told which master they are the rounding of, where both are stored. Pure."""
    entries = list(entries)
    by_name = {e.name: e for e in entries}
    found = []
    for entry in entries:
        if entry.family == MODEL and entry.spec.dtype.is_floating and entry.name not in buffers:
            kept = shared.get(entry.name, entry.name)
            master = by_name.get(f"optimizer.state.{kept}.fp32")
            if master is not None and master.spec.shape == entry.spec.shape and master.pieces != entry.pieces:
                entry = replace(entry, rounded_from=master.name)
        found.append(entry)
    return found
