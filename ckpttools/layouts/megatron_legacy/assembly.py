"""Puts the shares of all ranks together into whole tensors, each with the rule that it was put together by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.containers.parts import StoredTensor
from ckpttools.dtypes import DType
from ckpttools.findings import Finding
from ckpttools.layouts.megatron_legacy.cuts import Share
from ckpttools.layouts.megatron_legacy.rules import LOCAL_EXPERT
from ckpttools.model import Box, Extent, ObjectEntry, Path, PathKey, Piece, TensorEntry, TensorSpec, render_path
from ckpttools.pickles.views import kind_of


@dataclass(slots=True)
class _Whole:
    """What the ranks said of one tensor so far."""

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    rule: str
    where: str
    is_loose: bool
    pieces: dict[Box, Piece] = field(default_factory=dict)
    replicas: list[Piece] = field(default_factory=list)


class Assembly:
    """Collects shares and objects, and gives entries."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._tensors: dict[Path, _Whole] = {}
        self._objects: dict[str, ObjectEntry] = {}

    def add(self, path: Path, stored: StoredTensor, cut: Share, rank: int, rule: str, *, is_loose: bool = False) -> None:
        """Add a rank's share of the tensor at `path`; a box that is there already becomes a replica.

        Args: is_loose: whether replicas may differ.
        """
        file = stored.extent.file
        whole = self._tensors.setdefault(path, _Whole(path, stored.dtype, cut.shape, rule, file, is_loose))
        if (whole.dtype, whole.shape) != (stored.dtype, cut.shape):
            expected = f"{whole.dtype} {list(whole.shape)} in all, as in {whole.where}"
            found = f"{stored.dtype} {list(cut.shape)}"
            self.findings.append(Finding("rank-mismatch", f"{render_path(path)} in {file}", expected, found))
            return
        for local, box in cut.boxes:
            piece = Piece(box, stored.part(local), rank)
            if box in whole.pieces:
                whole.replicas.append(piece)
            else:
                whole.pieces[box] = piece

    def add_whole(self, path: Path, stored: StoredTensor, rank: int, rule: str = "") -> None:
        """Add a tensor that is a rank's own, or that every rank holds."""
        box = Box((0,) * len(stored.shape), stored.shape)
        self.add(path, stored, Share(stored.shape, ((box, box),)), rank, rule)

    def add_object(self, path: Path, record: object, *, extent: Extent | None = None, kind: str = "") -> None:
        """Add an object; the first rank's is kept."""
        name = render_path(path)
        entry = ObjectEntry(name, path, kind or kind_of(record), record, extent)
        self._objects.setdefault(name, entry)

    def tensors(self) -> Iterator[TensorEntry]:
        """The whole tensors: the model's as they first appear, states of the optimizer in the order of its parameters."""
        order = _model_order([str(path[0]) for path in self._tensors if len(path) == 1])
        for whole in sorted(self._tensors.values(), key=lambda w: _rank_of(w.path, order)):
            spec = TensorSpec(render_path(whole.path), whole.dtype, whole.shape)
            yield TensorEntry(
                spec,
                whole.path,
                tuple(whole.pieces.values()),
                tuple(whole.replicas),
                replicas_may_differ=whole.is_loose,
                rule=whole.rule,
            )

    def objects(self) -> tuple[ObjectEntry, ...]:
        """The objects, in the order of first appearance."""
        return tuple(self._objects.values())


def _model_order(names: Sequence[str]) -> dict[PathKey, int]:
    """Where each name stands in the model: experts of other ranks follow those of the first, layer by layer."""
    first: dict[str, int] = {}
    place: dict[str, tuple[int, int, int]] = {}
    for i, name in enumerate(names):
        match = LOCAL_EXPERT.fullmatch(name)
        at = first.setdefault(match["module"], i) if match else i
        place[name] = (at, int(match["expert"]) if match else 0, i)
    return {name: i for i, name in enumerate(sorted(names, key=place.__getitem__))}


def _rank_of(path: Path, order: Mapping[PathKey, int]) -> tuple[int, int]:
    """Where a tensor stands in a list: a model's tensor, a named state, anything else."""
    if len(path) == 1:
        return 0, order[path[0]]
    if len(path) > 3 and path[:2] == ("optimizer", "state"):
        return 1, order.get(path[2], len(order))
    return 2, 0
