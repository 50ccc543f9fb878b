"""What each rank's file holds of the model, as stored: chunks of named tensors and objects, in the order of the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.containers.parts import StoredTensor
from ckpttools.containers.torch_entries import RankFile
from ckpttools.containers.torch_extents import Expansion, locate_tensor
from ckpttools.containers.torch_values import MalformedError, TensorValue, read_value
from ckpttools.containers.trees import TreeLimitError, leaves
from ckpttools.findings import Finding
from ckpttools.layouts.megatron_legacy.arguments import Arguments
from ckpttools.layouts.megatron_legacy.names import Place, RankPath
from ckpttools.model import Path, render_path
from ckpttools.pickles.views import kind_of, mapping_items

CHUNK_KEY = re.compile(r"model(\d*)")
"""`model`, or `model0`, `model1`, ... where a stage holds several chunks of layers."""


@dataclass(slots=True)
class Chunk:
    """The part of the model that one rank holds as one run of layers."""

    place: Place
    number: int
    """Which chunk of its stage."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """By name as stored, with the layer numbers of the chunk."""
    objects: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Shard:
    """An opened file of a rank."""

    path: RankPath
    place: Place
    file: RankFile
    top: Mapping[object, object]
    """The top level of what it holds, read inertly."""
    arguments: Arguments
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def version(self) -> float:
        """The checkpoint version; 0 where none is stated, as its first files had none."""
        stated = self.top.get("checkpoint_version", 0)
        return float(stated) if isinstance(stated, (int, float)) else 0.0

    @property
    def step(self) -> int | None:
        """The iteration that it was saved at."""
        stated = next((self.top[key] for key in ("iteration", "total_iters") if key in self.top), None)
        return stated if type(stated) is int else None


class TensorReader:
    """Turns records of torch files into stored tensors; what is malformed becomes a finding and no tensor."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._expansion = Expansion()

    def read(self, file: RankFile, path: Path, record: object) -> StoredTensor | None:
        """The dense tensor of a record; None where it is something else, or cannot be read."""
        where = f"{render_path(path)} in {file.path}"
        try:
            value = read_value(record)
        except MalformedError as e:
            self.findings.append(Finding("bad-pickle", where, "a tensor as torch pickles it", str(e)))
            return None
        if not isinstance(value, TensorValue):
            return None
        extent = locate_tensor(file.torch, file.path, value, where, self._expansion)
        if isinstance(extent, Finding):
            self.findings.append(extent)
            return None
        return StoredTensor(value.dtype, value.shape, extent)

    def read_tree(
        self,
        file: RankFile,
        prefix: Path,
        tree: object,
        on_tensor: Callable[[Path, StoredTensor], None],
        on_object: Callable[[Path, object], None],
    ) -> None:
        """Hand over every leaf below `tree`, under its path from `prefix` on."""
        try:
            for leaf in leaves(tree):
                path = (*prefix, *leaf.path)
                before = len(self.findings)
                stored = self.read(file, path, leaf.record)
                if stored is not None:
                    on_tensor(path, stored)
                elif len(self.findings) == before:
                    on_object(path, leaf.record)
        except TreeLimitError as e:
            self.findings.append(Finding("pickle-limit", file.path, "a tree of entries", str(e)))


def read_chunks(shard: Shard, reader: TensorReader) -> list[Chunk]:
    """The model chunks of a file, in order."""
    keys = [(int(m[1] or 0), key) for key in shard.top if isinstance(key, str) and (m := CHUNK_KEY.fullmatch(key))]
    chunks = []
    for number, key in sorted(keys):
        chunk = Chunk(shard.place, number)

        def on_tensor(path: Path, stored: StoredTensor, chunk: Chunk = chunk) -> None:
            chunk.tensors[render_path(path)] = stored

        def on_object(path: Path, record: object, chunk: Chunk = chunk) -> None:
            if path:
                chunk.objects[render_path(path)] = record

        reader.read_tree(shard.file, (), shard.top[key], on_tensor, on_object)
        chunks.append(chunk)
    return chunks


def top_level(file: RankFile) -> tuple[Mapping[object, object], list[Finding]]:
    """What a file holds at its top; a finding where that is no dict."""
    pairs = mapping_items(file.torch.value)
    if pairs is None:
        if file.torch.value is None and file.torch.findings:
            return {}, []
        expected = "a dict with `model`, `args` and `iteration`"
        return {}, [Finding("bad-container", file.path, expected, kind_of(file.torch.value))]
    return dict(pairs), []


def check_steps(shards: Sequence[Shard]) -> list[Finding]:
    """A finding per file of another iteration than the first one's."""
    first = next((s for s in shards if s.step is not None), None)
    if first is None:
        return []
    return [
        Finding("step-mismatch", s.path.path, f"iteration {first.step}, as in {first.path.path}", f"iteration {s.step}")
        for s in shards
        if s.step is not None and s.step != first.step
    ]
