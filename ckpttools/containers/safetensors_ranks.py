"""A safetensors file of one rank: its share of each tensor, and the note that says what the shares are parts of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from ckpttools.containers.local_boxes import METADATA_KEY, LocalBoxes, parse_local_boxes, render_local_boxes
from ckpttools.containers.safetensors_file import (
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    canonical_order,
    render_header,
    stored_form,
)
from ckpttools.errors import ConversionError
from ckpttools.findings import Finding
from ckpttools.model import ArrangedFile, Literal, Mesh, ObjectEntry, Slot, TensorSpec
from ckpttools.placement.held import HeldTensor, held_by, uncuttable
from ckpttools.placement.local import PlacedTensor


def arrange_rank_file(
    path: str, held: Mapping[str, HeldTensor], metadata: Mapping[str, str], mesh: Mesh, rank: int
) -> ArrangedFile:
    """The file that holds a rank's share of some tensors, by their names in it. Pure.

    Raises: ConversionError: when the header would be larger than the format allows.
    """
    note = render_local_boxes(held.items(), mesh, rank).decode()
    specs = [replace(one.spec, name=name) for name, one in held.items()]
    header = render_header(specs, {**metadata, METADATA_KEY: note})
    if len(header) - 8 > MAX_HEADER_BYTES:
        raise ConversionError(
            "too many tensors for one safetensors file",
            where=path,
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found=f"{len(header) - 8} bytes for {len(specs)} tensors",
            hints=["ask for smaller files, so that each holds fewer tensors"],
        )
    slots: list[Slot] = []
    offset = len(header)
    for spec in canonical_order(specs):
        slots += held[spec.name].slots(offset)
        offset += spec.length_bytes
    return ArrangedFile(path, offset, tuple(slots), (Literal(0, header),))


class _Measured(Protocol):
    """A tensor, or a share of one."""

    @property
    def spec(self) -> TensorSpec: ...


Tensor = TypeVar("Tensor", bound=_Measured)


def in_parts(tensors: Iterable[tuple[str, Tensor]], max_bytes: int | None) -> list[dict[str, Tensor]]:
    """Tensors by name, a dict per file: in order, a new one where the next tensor would exceed the limit; at least one. Pure."""
    parts: list[dict[str, Tensor]] = [{}]
    total_bytes = 0
    for name, tensor in tensors:
        if max_bytes is not None and parts[-1] and total_bytes + tensor.spec.length_bytes > max_bytes:
            parts.append({})
            total_bytes = 0
        parts[-1][name] = tensor
        total_bytes += tensor.spec.length_bytes
    return parts


def unholdable(tensors: Sequence[PlacedTensor], mesh: Mesh, objects: Sequence[ObjectEntry]) -> dict[str, str]:
    """Per name of a tensor or object: why files of ranks in safetensors cannot hold it, whoever reads them. Pure."""
    refused = {o.name: f"{o.kind}: safetensors holds tensors only" for o in objects}
    return refused | unstorable(tensors, mesh) | uncuttable(tensors, mesh)


def unstorable(tensors: Sequence[PlacedTensor], mesh: Mesh) -> dict[str, str]:
    """Per output name: why safetensors cannot store some rank's share of a tensor."""
    refused = {}
    for tensor in tensors:
        name = tensor.spec.name
        if name == "__metadata__" or "\0" in name or not _is_text(name):
            refused[name] = "safetensors cannot store a tensor of this name"
        shares = (one.spec for rank in range(mesh.ranks) for one in held_by([tensor], mesh, rank))
        bad = next((spec for spec in shares if stored_form(spec) is None), None)
        if bad is not None:
            refused[name] = f"safetensors has no {bad.dtype} {list(bad.shape)}"
    return refused


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_note(header: SafetensorsHeader, findings: list[Finding]) -> LocalBoxes | None:
    """The note in a header; None, with a finding where it is bad, when there is none that could be used.

    A tensor whose stored shape is not that of its note is a finding, and left out of the note.
    """
    if METADATA_KEY not in header.metadata:
        return None
    where = f"{METADATA_KEY} in {header.file}"
    try:
        note = parse_local_boxes(header.metadata[METADATA_KEY].encode("utf-8", "surrogatepass"))
    except ValueError as e:
        findings.append(Finding("bad-header", where, "what the tensors are parts of", str(e)))
        return None
    stored = {entry.name: entry.shape for entry in header.entries}
    wrong = [name for name, box in note.tensors.items() if name in stored and stored[name] != box.local.shape]
    for name in wrong[:8]:
        found = f"{list(stored[name])}"
        findings.append(
            Finding("piece-mismatch", f"`{name[:80]}` in {header.file}", f"{list(note.tensors[name].local.shape)}", found)
        )
    return replace(note, tensors={name: box for name, box in note.tensors.items() if name not in wrong})
