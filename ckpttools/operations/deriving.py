"""Leaves out of a conversion what a target need not be given, because it follows from the rest."""

from __future__ import annotations

from dataclasses import replace

from ckpttools.errors import ConversionError, UsageError
from ckpttools.gather import Gather
from ckpttools.model import Mesh
from ckpttools.operations.holding import Taken
from ckpttools.operations.targets import Details, Target


def without_derived(taken: Taken, target: Target, details: Details, mesh: Mesh) -> Taken:
    """What is left to write for a target that makes some tensors again, or has several as one; the latter are compared.

    Raises: UsageError: when the target is not told the ZeRO stage, or another one is. ConversionError: when tensors that must
        be equal are not.
    """
    if (target.derives is None) != (details.zero is None):
        raise UsageError("a DeepSpeed target and its ZeRO stage go together", hints=["--to deepspeed --zero 3"])
    if target.derives is None or details.zero is None:
        return taken
    selection = taken.selection
    derived = target.derives(selection.tensors, selection.objects, stage=details.zero, dp=mesh.ranks)
    gather = Gather(taken.snapshot.source, memory_bytes=1 << 20)

    def value(name: str) -> bytes:
        return b"".join(bytes(view) for view in gather.stream(selection.tensors[name]))

    for name, kept in derived.equal.items():
        same = selection.tensors[name].pieces == selection.tensors[kept].pieces
        if not same and value(name) != value(kept):
            found = f"{selection.tensors[kept].name} has another value"
            raise ConversionError(f"one number for a whole parameter group, and {name} is not the same", found=found)
    out = derived.left | derived.equal.keys() | derived.aliases.keys()
    tensors = {n: t for n, t in selection.tensors.items() if n not in out}
    return replace(taken, selection=replace(selection, tensors=tensors, aliases={**derived.aliases, **derived.equal}))
