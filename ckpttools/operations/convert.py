"""Consolidate: a checkpoint of any layout becomes portable files, and every tensor is proved unchanged.

Select, arrange, plan, execute: the plan is complete before a byte is written, values stream from the source's pieces
to their places, and the output is read back and sealed before it gets its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttools import plan as plans
from ckpttools.cast import CastCounts, require_castable
from ckpttools.containers.trees import sequence_branches
from ckpttools.digest import TensorDigest, digest_bytes
from ckpttools.dtypes import DType
from ckpttools.errors import DestinationError, FindingsError, UsageError
from ckpttools.execute import Executed, run
from ckpttools.execute.run import Finish
from ckpttools.findings import Finding
from ckpttools.layouts import SEAL_NAME, Snapshot, open_snapshot, safetensors, sniff, torch
from ckpttools.model import ArrangedFile, Arrangement, FileEntry, Path, TensorSpec
from ckpttools.operations.prove import SourceProof
from ckpttools.operations.select import Choice, Selection, select
from ckpttools.plan import Plan
from ckpttools.seal import Seal, SealedFile, SealedPiece, render_seal
from ckpttools.storage.source import exists, is_url, open_source
from ckpttools.storage.target import open_target

DEFAULT_SHARD_BYTES = 5_000_000_000
_FILE_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
_NEVER_CAST = frozenset({"float8_e8m0fnu", "float4_e2m1fn_x2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"})
"""Scales and packed elements of block formats, whose values mean nothing by themselves."""
_COMPANIONS = re.compile(
    r"(huggingface/)?((generation_|adapter_|preprocessor_|processor_|tokenizer_|video_preprocessor_)?config\.json|params\.json"
    r"|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|chat_template.*|.*\.jinja|.*\.model"
    r"|(configuration|modeling|tokenization|processing)_.*\.py)"
)
"""What transformers needs beside the weights; metrics, logs and training arguments stay behind."""


@dataclass(frozen=True)
class Conversion:
    """What was (or would be) written."""

    plan: Plan
    selection: Selection
    arrangement: Arrangement
    destination: str
    is_file: bool
    casts: Mapping[str, CastCounts] = field(default_factory=dict)
    """What each cast could not keep, by output name."""
    seal: Seal | None = None
    """None for a dry run."""
    resumed_bytes: int = 0
    """Bytes that an earlier, interrupted run had written."""


def consolidate(
    location: str,
    destination: str,
    *,
    choice: Choice | None = None,
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
        destination: a directory, or a file when its suffix says so (`.safetensors`, `.pt`, ...).
        choice: which tensors, under which names; the model's for safetensors and everything for torch unless given.
        max_shard_bytes: start another safetensors file beyond it; None for one file whatever its size.
        allowed_findings: codes of errors in the source to go on in spite of.

    Raises: FindingsError: when the source is not whole. ConversionError: when it cannot be done as asked.
        DestinationError, LockedError, StorageError: when it cannot be written.
    """
    format, is_file = _target_kind(destination, format)
    _require_replaceable(destination, is_file=is_file, is_overwriting=is_overwriting)
    snapshot = open_snapshot(location, is_located=True)
    _require_whole(snapshot, allowed_findings)
    conversion = _plan(snapshot, destination, choice or Choice(), format, None if is_file else max_shard_bytes, dtype, is_file)
    if on_plan is not None:
        on_plan(conversion.plan)
    if is_dry_run:
        return conversion
    proof = SourceProof(
        snapshot, list(conversion.selection.tensors.values()), allowed_findings, jobs=jobs, memory_bytes=memory_bytes
    )
    if is_url(destination):  # there the output becomes visible as it is written, so the source is proved first
        proof.read_first()
    sealed: list[Seal] = []
    executed = run(
        conversion.plan,
        snapshot.source,
        open_target(destination, is_file=is_file),
        jobs=jobs,
        memory_bytes=memory_bytes,
        progress=progress,
        overwrite=is_overwriting,
        verify=is_verifying,
        finish=_finisher(conversion, snapshot, proof, sealed),
        watch=proof.watch,
    )
    _require_readable(conversion)
    return _with_results(conversion, executed, sealed[0])


def _finisher(conversion: Conversion, snapshot: Snapshot, proof: SourceProof, sealed: list[Seal]) -> Finish:
    """What is done when all is written and nothing is visible yet: prove the source, and seal."""

    def finish(executed: Executed) -> dict[str, bytes]:
        proof.require({conversion.plan.tensors[t.spec.name].source.name: t.source_digest for t in executed.tensors})
        sealed.append(_seal(conversion, snapshot, executed))
        return {_seal_name(conversion): render_seal(sealed[0])}

    return finish


def _seal_name(conversion: Conversion) -> str:
    """In a directory, or beside a single file."""
    name = conversion.destination.rstrip("/").rpartition("/")[2]
    return f"{name}.{SEAL_NAME}" if conversion.is_file else SEAL_NAME


def _with_results(conversion: Conversion, executed: Executed, seal: Seal) -> Conversion:
    casts = {t.spec.name: t.counts for t in executed.tensors if t.counts is not None}
    return replace(conversion, seal=seal, casts=casts, resumed_bytes=executed.resumed_bytes)


def _plan(
    snapshot: Snapshot,
    destination: str,
    choice: Choice,
    format: str,
    max_shard_bytes: int | None,
    dtype: DType | None,
    is_file: bool,
) -> Conversion:
    """What will be written, to the byte."""
    selection = select(snapshot.checkpoint, choice, is_weights_only_by_default=format == "safetensors")
    specs = [_output_spec(name, entry.spec, dtype) for name, entry in selection.tensors.items()]
    file_name = destination.rstrip("/").rpartition("/")[2] if is_file else ""
    if format == "torch":
        arrangement = _arrange_torch(snapshot, selection, specs, file_name or "model.pt")
    else:
        arrangement = _arrange_safetensors(selection, specs, max_shard_bytes, file_name)
    plan = plans.make(
        snapshot.checkpoint,
        arrangement,
        tensor_of=selection.tensors,
        casts={s.name: s.dtype for s in specs if s.dtype != selection.tensors[s.name].spec.dtype},
        companions=() if is_file else _companions(snapshot),
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


def _require_replaceable(destination: str, *, is_file: bool, is_overwriting: bool) -> None:
    """What can be told of a destination before anything is read: it is named, and what would be replaced is an output.

    A directory with other things in it is not replaced even with --overwrite: an empty variable in a script would
    otherwise cost a home directory.
    """
    if not destination:
        raise UsageError("the destination has no name")
    seal = f"{destination}.{SEAL_NAME}"
    if is_file and not is_overwriting and exists(seal) and not exists(destination):
        raise DestinationError(f"a seal is there already: {seal}", hints=["pass --overwrite to replace it"])
    if not is_file and is_overwriting and exists(destination):
        source, file = open_source(destination)
        listing = source.listing()
        if not file and len(listing) and SEAL_NAME not in listing and not sniff(source, listing):
            names = ", ".join(f.path for f in list(listing)[:4])
            raise DestinationError(f"not a checkpoint, so not replaced: {destination}", found=names)


def _require_whole(snapshot: Snapshot, allowed: Sequence[str]) -> None:
    """Nothing is made from a source with errors, unless the user knows of them."""
    errors = [f for f in snapshot.checkpoint.findings if f.is_error and f.code not in allowed]
    if errors:
        codes = sorted({f.code for f in errors})
        hint = "--allow-findings " + " --allow-findings ".join(codes) + " goes on in spite of them"
        raise FindingsError(f"the source is not whole: {snapshot.checkpoint.path}", errors, hints=[hint])


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
    return torch.arrange(
        specs,
        paths=paths,
        objects=[o for o in selection.objects if o.record is not None or o.kind == "NoneType"],
        sequences=_sequences(snapshot),
        aliases=selection.aliases,
        file_name=file_name,
    )


def _sequences(snapshot: Snapshot) -> dict[Path, str]:
    """Which branches of the source's nested values are lists and tuples."""
    checkpoint = snapshot.checkpoint
    found: dict[Path, str] = {}
    if checkpoint.layout == "dcp":  # its planner makes dict keys text, so an integer is the place in a list
        paths = [*(t.path for t in checkpoint.tensors), *(o.path for o in checkpoint.objects)]
        for path in paths:
            found |= {path[:i]: "list" for i, key in enumerate(path) if type(key) is int}
    for path, value in checkpoint.trees.items():
        found = {p: kind for p, kind in found.items() if p[: len(path)] != path or not path} | sequence_branches(value, path)
    return found


def _companions(snapshot: Snapshot) -> list[FileEntry]:
    """Config and tokenizer files beside the source."""
    return [f for f in snapshot.checkpoint.files if f.role == "companion" and _COMPANIONS.fullmatch(f.path)]


def _seal(conversion: Conversion, snapshot: Snapshot, executed: Executed) -> Seal:
    """The seal of what was written: digests as they were computed on the way, so nothing is read again."""
    tensors = tuple(TensorDigest.of(t.spec, t.digest) for t in executed.tensors)
    pieces = {
        t.spec.name: tuple(SealedPiece(s.file, s.offset, s.length, s.box, s.digest) for s in t.slots) for t in executed.tensors
    }
    files = [SealedFile(f.path, f.length_bytes, _literal_digest(f)) for f in conversion.arrangement.files]
    files += [SealedFile(c.file, c.length, c.digest) for c in executed.carries]
    groups: dict[str, list[str]] = {}
    for alias, kept in conversion.selection.aliases.items():
        groups.setdefault(kept, [kept]).append(alias)
    aliases = tuple(tuple(group) for group in groups.values())
    origin: dict[str, object] = {"layout": snapshot.checkpoint.layout}
    casts = {t.spec.name: t.spec.dtype.name for t in executed.tensors if t.counts is not None}
    if casts:
        origin["casts"] = casts
    step = snapshot.checkpoint.step
    return Seal(executed.algorithm, tensors, pieces, tuple(files), conversion.arrangement.layout, step, aliases, origin)


def _literal_digest(file: ArrangedFile) -> str:
    """The digest of an output file that has no tensors (an index); empty for the others."""
    if file.slots:
        return ""
    return digest_bytes(b"".join(literal.data for literal in file.literals))


def _require_readable(conversion: Conversion) -> None:
    """Our own reader understands what was written, and sees the tensors that were meant."""
    checkpoint = open_snapshot(conversion.destination, is_located=True).checkpoint
    found = {t.name: (t.spec.dtype, t.spec.shape) for t in checkpoint.tensors if t.name in conversion.plan.tensors}
    meant = {name: (t.dtype, t.source.spec.shape) for name, t in conversion.plan.tensors.items()}
    errors = [f for f in checkpoint.findings if f.is_error]
    if found != meant:
        differing = sorted(n for n in meant if found.get(n) != meant[n])
        errors += [Finding("missing-tensor", n, f"{meant[n][0]} {list(meant[n][1])}", "another or none") for n in differing[:20]]
    if errors:
        raise FindingsError(f"what was written does not read back: {conversion.destination}", errors)
