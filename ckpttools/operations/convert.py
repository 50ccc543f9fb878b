"""Consolidate: a checkpoint of any layout becomes portable files, and every tensor is proved unchanged.

Select, arrange, plan, execute: the plan is complete before a byte is written, values stream from the source's pieces
to their places, and the output is read back and sealed before it gets its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckpttools import plan as plans
from ckpttools.cast import require_castable
from ckpttools.dtypes import DType, parse_dtype
from ckpttools.errors import UsageError
from ckpttools.layouts import Snapshot, open_snapshot, safetensors, torch
from ckpttools.model import Arrangement, Path, TensorSpec
from ckpttools.operations.conversion import (
    Conversion,
    Manner,
    carry_out,
    companions,
    require_replaceable,
    require_whole,
    unproved,
)
from ckpttools.operations.naming import Named, Naming, name_tensors
from ckpttools.operations.nesting import mappings_of, order_of, sequences_of
from ckpttools.operations.replicas import COMPARE, allowed, settle
from ckpttools.operations.select import Choice, Selection, select
from ckpttools.plan import Plan

DEFAULT_SHARD_BYTES = 5_000_000_000
_FILE_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
_NEVER_CAST = frozenset({"float8_e8m0fnu", "float4_e2m1fn_x2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"})
"""Scales and packed elements of block formats, whose values mean nothing by themselves."""


def consolidate(
    location: str,
    destination: str,
    *,
    roots: Sequence[str] = (),
    replicas: str = COMPARE,
    choice: Choice | None = None,
    naming: Naming | None = None,
    format: str | None = None,
    max_shard_bytes: int | None = DEFAULT_SHARD_BYTES,
    dtype: DType | None = None,
    allowed_findings: Sequence[str] = (),
    is_dry_run: bool = False,
    is_overwriting: bool = False,
    is_verifying: bool = True,
    jobs: int = 1,
    memory_bytes: int = 256 << 20,
    progress: Callable[[int], None] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Conversion:
    """Write the tensors of the snapshot at a location as portable files, and a seal beside them.

    Args:
        roots: further places that hold files of the same snapshot.
        replicas: what to do where copies of a box differ, one of `replicas.RULES`.
        destination: a directory, or a file when its suffix says so (`.safetensors`, `.pt`, ...).
        naming: the names of another program that the tensors get.
        choice: which tensors, under which names; the model's for safetensors and everything for torch unless given.
        max_shard_bytes: start another safetensors file beyond it; None for one file whatever its size.
        allowed_findings: codes of errors in the source to go on in spite of.

    Raises: FindingsError: when the source is not whole. ConversionError: when it cannot be done as asked.
        DestinationError, LockedError, StorageError: when it cannot be written.
    """
    format, is_file = _target_kind(destination, format)
    require_replaceable(destination, (location, *roots), is_file=is_file, is_overwriting=is_overwriting)
    snapshot = open_snapshot(location, roots=roots, is_located=True)
    allowed_findings = allowed(replicas, allowed_findings)
    require_whole(snapshot, allowed_findings)
    selection = select(snapshot.checkpoint, choice or Choice(), is_weights_only_by_default=format == "safetensors")
    rule = COMPARE if is_dry_run else replicas  # a dry run reads no values
    settled = settle(snapshot, selection.tensors, rule, jobs=jobs, memory_bytes=memory_bytes)
    selection = replace(selection, tensors=settled.tensors)
    named = name_tensors(selection, snapshot, naming) if naming is not None and naming.names else Named(selection, ())
    conversion = _plan(snapshot, named, destination, format, None if is_file else max_shard_bytes, dtype, is_file)
    conversion = replace(conversion, replicas=settled.record, notes=(*unproved(snapshot), *named.notes))
    if on_plan is not None:
        on_plan(conversion.plan)
    if is_dry_run:
        return conversion
    manner = Manner(allowed_findings, is_overwriting, is_verifying, jobs, memory_bytes, progress)
    return carry_out(conversion, snapshot, manner)


def _plan(
    snapshot: Snapshot,
    named: Named,
    destination: str,
    format: str,
    max_shard_bytes: int | None,
    dtype: DType | None,
    is_file: bool,
) -> Conversion:
    """What will be written, to the byte."""
    selection, wide = named.selection, parse_dtype("float32")
    specs = [
        _output_spec(name, entry.spec, dtype or (wide if name in selection.widened else None))
        for name, entry in selection.tensors.items()
    ]
    file_name = destination.rstrip("/").rpartition("/")[2] if is_file else ""
    if format == "torch":
        arrangement = _arrange_torch(snapshot, selection, specs, file_name or "model.pt")
    else:
        arrangement = _arrange_safetensors(selection, specs, max_shard_bytes, file_name)
    if not is_file:
        arrangement = replace(arrangement, files=(*named.files, *arrangement.files))
    plan = plans.make(
        snapshot.checkpoint,
        arrangement,
        tensor_of=selection.tensors,
        casts={s.name: s.dtype for s in specs if s.dtype != selection.tensors[s.name].spec.dtype},
        companions=() if is_file else companions(snapshot),
        listing=snapshot.listing,
    )
    return Conversion(plan, selection, arrangement, destination, is_file)


def _target_kind(destination: str, format: str | None) -> tuple[str, bool]:
    """(format, whether the destination is one file), from the suffix where nothing else is said."""
    suffix = next((s for s in _FILE_SUFFIXES if destination.endswith(s)), None)
    if suffix is None:
        return format or "safetensors", False
    if format is not None and format != _FILE_SUFFIXES[suffix]:
        raise UsageError(f"--format {format} does not go with a file named *{suffix}: {destination}")
    return _FILE_SUFFIXES[suffix], True


def _output_spec(name: str, spec: TensorSpec, dtype: DType | None) -> TensorSpec:
    """A tensor as it comes out: under its new name, cast when asked and it is of floating point."""
    if dtype is None or not spec.dtype.is_floating or spec.dtype == dtype or spec.dtype.name in _NEVER_CAST:
        return replace(spec, name=name)
    require_castable(name, spec.dtype, dtype)
    return replace(spec, name=name, dtype=dtype)


def _arrange_safetensors(
    selection: Selection, specs: Sequence[TensorSpec], max_shard_bytes: int | None, file_name: str
) -> Arrangement:
    """Shards and an index, or one file; the header says which name stands for which, as the official writer does."""
    aliases = {name: kept for name, kept in selection.aliases.items() if name != "format"}
    return safetensors.arrange(
        specs, max_shard_bytes=max_shard_bytes, metadata=aliases, single_file_name=file_name or "model.safetensors"
    )


def _arrange_torch(snapshot: Snapshot, selection: Selection, specs: Sequence[TensorSpec], file_name: str) -> Arrangement:
    """Nested as in the source; a renamed tensor stands at the top level under its new name."""
    paths: dict[str, Path] = {n: e.path if n == e.name else (n,) for n, e in selection.tensors.items()}
    by_name = snapshot.checkpoint.by_name
    for alias in selection.aliases:
        paths[alias] = by_name[alias].path if alias in by_name else (alias,)
    order = order_of(snapshot.checkpoint)
    order |= {paths[n]: order[e.path] for n, e in selection.tensors.items() if e.path in order}
    is_renamed = any(n != e.name for n, e in selection.tensors.items())
    return torch.arrange(
        specs,
        paths=paths,
        objects=[o for o in selection.objects if o.record is not None or o.kind == "NoneType"],
        sequences=sequences_of(snapshot.checkpoint),
        mappings=mappings_of(snapshot.checkpoint, has_attributes=not is_renamed),  # `_metadata` goes by the names of modules
        order=order,
        aliases=selection.aliases,
        file_name=file_name,
    )
