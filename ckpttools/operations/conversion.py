"""What consolidate and reshard share: from a plan to an output that is proved, sealed, and only then visible.

A conversion is complete before a byte is written; values stream from the source's pieces to their places, and the output is
read back and sealed before it gets its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttools.cast import CastCounts
from ckpttools.containers.copies import with_roots
from ckpttools.digest import TensorDigest, digest_bytes, fingerprint
from ckpttools.dtypes import DType
from ckpttools.errors import DestinationError, DestinationExistsError, FindingsError, UsageError
from ckpttools.execute import Executed, run
from ckpttools.execute.run import Finish
from ckpttools.findings import Finding
from ckpttools.layouts import SEAL_NAME, Snapshot, open_snapshot, sniff
from ckpttools.model import ArrangedFile, Arrangement, Checkpoint, FileEntry, TensorEntry
from ckpttools.operations.prove import SourceProof
from ckpttools.operations.replicas import REPLICA_HINT
from ckpttools.operations.select import Selection
from ckpttools.plan import Plan
from ckpttools.seals import Seal, SealedFile, render_seal
from ckpttools.storage.local_target import LocalTarget
from ckpttools.storage.source import exists, holds_more_than, is_url, open_source
from ckpttools.storage.standing import OtherwiseError, StandingTarget
from ckpttools.storage.target import open_target
from ckpttools.storage.upload import UrlTarget

COMPANIONS = re.compile(
    r"(huggingface/)?((generation_|adapter_|preprocessor_|processor_|tokenizer_|video_preprocessor_)?config\.json|params\.json"
    r"|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|chat_template.*|.*\.jinja|.*\.model"
    r"|(configuration|modeling|tokenization|processing)_.*\.py)"
)
"""What transformers needs beside the weights; metrics, logs and training arguments stay behind."""


_MAX_REPLACED_FILES = 20_000
"""In a directory that this program did not seal; looking at each file of a home directory takes minutes."""


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
    fingerprint: str = ""
    """Of all tensors of the output, by the names that its reader gives, as `hash` has it; empty before it is written, and where
    the digest of one is not known without reading it."""
    """None for a dry run."""
    carried: tuple[TensorEntry, ...] = ()
    """Source tensors inside of objects that go over byte for byte."""
    derived: tuple[TensorEntry, ...] = ()
    """Source tensors that are not written because their masters stand for them."""
    made_again: tuple[str, ...] = ()
    """Names of tensors that are not written because they follow from the rest, and whoever loads the output makes them again."""
    notes: tuple[str, ...] = ()
    """What people should hear: of names that were converted, and of what the source cannot prove."""
    resumed_bytes: int = 0
    """Bytes that an earlier, interrupted run had written."""
    unwritten: tuple[str, ...] = ()
    """Names of objects that were selected and that the output, read back, does not show."""
    was_done: bool = False
    """Whether an earlier run had written all of it, so that nothing was written now."""
    replicas: Mapping[str, object] = field(default_factory=dict)
    """How copies that differ were settled (`operations.replicas`); empty when they had to be equal."""


@dataclass(frozen=True)
class Manner:
    """How a conversion is carried out; none of it decides what is written."""

    allowed_findings: Sequence[str] = ()
    """Codes of errors in the source to go on in spite of."""
    is_overwriting: bool = False
    is_verifying: bool = True
    jobs: int = 1
    memory_bytes: int = 256 << 20
    progress: Callable[[int], None] | None = None


def carry_out(conversion: Conversion, snapshot: Snapshot, manner: Manner) -> Conversion:
    """Write what is planned, prove the source on the way, and seal the output.

    Raises: FindingsError: when the source turns out damaged, or what was written does not read back. DestinationError,
        LockedError, StorageError: when it cannot be written.
    """
    tensors = list(conversion.selection.tensors.values())
    proof = SourceProof(
        snapshot,
        tensors,
        manner.allowed_findings,
        objects=conversion.selection.objects,
        derived=conversion.derived,
        jobs=manner.jobs,
        memory_bytes=manner.memory_bytes,
    )
    if is_url(conversion.destination):  # there the output becomes visible as it is written, so the source is proved first
        proof.read_first()
    sealed: list[Seal] = []
    seen: list[Checkpoint] = []

    def write(target: LocalTarget | UrlTarget | StandingTarget, *, is_verifying: bool) -> Executed:
        return run(
            conversion.plan,
            snapshot.source,
            target,
            jobs=manner.jobs,
            memory_bytes=manner.memory_bytes,
            progress=manner.progress,
            overwrite=manner.is_overwriting,
            verify=is_verifying,
            finish=_finisher(conversion, snapshot, proof, sealed, seen, target),
            watch=proof.watch,
            roundings={} if is_url(conversion.destination) else _roundings(conversion, proof),
        )

    standing: StandingTarget | None = None
    target = open_target(conversion.destination, is_file=conversion.is_file)
    try:
        executed = write(target, is_verifying=manner.is_verifying)
    except FindingsError as e:
        if isinstance(target, LocalTarget):
            e.hints = (
                *e.hints,
                f"unfinished output is left in {target.partial}: for a run with --allow-findings, or to be deleted",
            )
        raise
    except DestinationExistsError as e:  # by a run that was killed when it had finished, or by a script that starts it twice
        standing = StandingTarget(conversion.destination, is_file=conversion.is_file)
        try:
            standing.require_lengths((f.path, f.length_bytes) for f in conversion.plan.files)
            executed = write(standing, is_verifying=False)
        except OtherwiseError as other:
            e.found = f"not what would be written: {other}"
            raise e from other
    if is_url(conversion.destination):
        seen.append(_require_readable(conversion, conversion.destination))
    result = _with_results(conversion, executed, sealed[0], seen[-1])
    return replace(result, was_done=standing is not None, unwritten=_unwritten(conversion, seen))


def _fingerprint(seal: Seal, written: Checkpoint, aliases: Mapping[str, str]) -> str:
    """Of all tensors that the output shows, further names of one included; empty where a digest is not known."""
    known = {t.name: t for t in seal.tensors}
    for group in (*written.aliases, *((kept, alias) for alias, kept in aliases.items())):
        first = next((known[name] for name in group if name in known), None)
        if first is not None:
            known |= {name: first for name in group if name not in known}
    found = [(t.spec, known.get(t.name)) for t in written.tensors]
    if any(d is None or (d.dtype, d.shape) != (spec.dtype.name, spec.shape) for spec, d in found):
        return ""
    return fingerprint([TensorDigest.of(spec, d.digest) for spec, d in found if d is not None], seal.algorithm)


def _roundings(conversion: Conversion, proof: SourceProof) -> dict[str, DType]:
    """The masters, by output name, whose rounding is digested on the way."""
    wanted = proof.roundings()
    return {name: wanted[t.source.name] for name, t in conversion.plan.tensors.items() if t.source.name in wanted}


def _finisher(
    conversion: Conversion,
    snapshot: Snapshot,
    proof: SourceProof,
    sealed: list[Seal],
    seen: list[Checkpoint],
    target: LocalTarget | UrlTarget | StandingTarget,
) -> Finish:
    """What is done when all is written and (on a local disk) nothing is visible yet: prove the source, read, and seal."""

    def finish(executed: Executed) -> dict[str, Iterator[bytes]]:
        read = [(conversion.plan.tensors[t.spec.name].source.name, t) for t in executed.tensors]
        proof.require({n: t.source_digest for n, t in read}, {n: t.rounded_digest for n, t in read if t.rounded_digest})
        if isinstance(target, LocalTarget):
            seen.append(_require_readable(conversion, target.built))
        elif isinstance(target, StandingTarget):
            seen.append(_require_readable(conversion, conversion.destination))
        inner = proof.digests_of(conversion.carried)
        sealed.append(_seal(conversion, snapshot, executed, inner))
        return {_seal_name(conversion): render_seal(sealed[0])}

    return finish


def _seal_name(conversion: Conversion) -> str:
    """In a directory, or beside a single file."""
    name = conversion.destination.rstrip("/").rpartition("/")[2]
    return f"{name}.{SEAL_NAME}" if conversion.is_file else SEAL_NAME


def _with_results(conversion: Conversion, executed: Executed, seal: Seal, written: Checkpoint) -> Conversion:
    casts = {t.spec.name: t.counts for t in executed.tensors if t.counts is not None}
    whole = _fingerprint(seal, written, conversion.selection.aliases)
    return replace(conversion, seal=seal, fingerprint=whole, casts=casts, resumed_bytes=executed.resumed_bytes)


def require_replaceable(destination: str, sources: Sequence[str], *, is_file: bool, is_overwriting: bool) -> None:
    """What can be told of a destination before anything is read: it is named, and what would be replaced is an output.

    A directory with other things in it is not replaced even with --overwrite: an empty variable in a script would
    otherwise cost a home directory.
    """
    if not destination:
        raise UsageError("the destination has no name")
    if not is_url(destination):
        LocalTarget(destination, is_file=is_file).require_apart(sources)
    seal = f"{destination}.{SEAL_NAME}"
    if is_file and not is_overwriting and exists(seal) and not exists(destination):
        raise DestinationError(f"a seal is there already: {seal}", hints=["pass --overwrite to replace it"])
    if not is_file and is_overwriting and exists(destination):
        source, file = open_source(destination)
        if not file and holds_more_than(destination, _MAX_REPLACED_FILES) and not exists(f"{destination}/{SEAL_NAME}"):
            found = f"more than {_MAX_REPLACED_FILES} files, and no {SEAL_NAME}"
            raise DestinationError(f"not taken for a checkpoint, so not replaced: {destination}", found=found)
        listing = source.listing()
        if not file and len(listing) and SEAL_NAME not in listing and not sniff(source, listing):
            names = ", ".join(f.path for f in list(listing)[:4])
            raise DestinationError(f"not a checkpoint, so not replaced: {destination}", found=names)


def require_whole(snapshot: Snapshot, allowed: Sequence[str]) -> None:
    """Nothing is made from a source with errors, unless the user knows of them."""
    errors = [f for f in snapshot.checkpoint.findings if f.is_error and f.code not in allowed]
    if errors:
        errors = list(with_roots(errors, snapshot.checkpoint.files))
        codes = sorted({f.code for f in errors})
        hint = "--allow-findings " + " --allow-findings ".join(codes) + " goes on in spite of them"
        hints = [REPLICA_HINT] if codes == ["replica-mismatch"] else [hint]
        raise FindingsError(f"the source is not whole: {snapshot.checkpoint.path}", errors, hints=hints)


def unproved(snapshot: Snapshot) -> tuple[str, ...]:
    """What people should hear of a source that may lack a part without anything of it telling so."""
    found = [f for f in snapshot.checkpoint.findings if f.code == "completeness-unproved"]
    return tuple(f"not proved complete: {f.where}: nothing states {f.expected}; found {f.found}" for f in found)


def companions(snapshot: Snapshot) -> list[FileEntry]:
    """Config and tokenizer files beside the source."""
    return [f for f in snapshot.checkpoint.files if f.role == "companion" and COMPANIONS.fullmatch(f.path)]


def _seal(conversion: Conversion, snapshot: Snapshot, executed: Executed, inner: Sequence[TensorDigest]) -> Seal:
    """The seal of what was written: digests as they were computed on the way, so nothing is read again."""
    tensors = (*(TensorDigest.of(t.spec, t.digest) for t in executed.tensors), *inner)
    files = [SealedFile(f.path, f.length_bytes, _literal_digest(f)) for f in conversion.arrangement.files]
    arranged = {f.path for f in conversion.arrangement.files}
    files += [SealedFile(c.file, c.length, c.digest) for c in executed.carries if c.file not in arranged]
    groups: dict[str, list[str]] = {}
    for alias, kept in conversion.selection.aliases.items():
        groups.setdefault(kept, [kept]).append(alias)
    aliases = tuple(tuple(group) for group in groups.values())
    origin: dict[str, object] = {"layout": snapshot.checkpoint.layout}
    casts = {t.spec.name: t.spec.dtype.name for t in executed.tensors if t.counts is not None}
    if casts:
        origin["casts"] = casts
    if snapshot.checkpoint.roots:
        origin["roots"] = list(snapshot.checkpoint.roots)
    if conversion.replicas:
        origin["replicas"] = dict(conversion.replicas)
    step = snapshot.checkpoint.step
    return Seal(executed.algorithm, tensors, executed.pieces, tuple(files), conversion.arrangement.layout, step, aliases, origin)


def _literal_digest(file: ArrangedFile) -> str:
    """The digest of an output file that is known beforehand (an index); empty for the others."""
    if file.slots or file.carries or file.checksums:
        return ""
    return digest_bytes(b"".join(literal.data for literal in file.literals))


def _unwritten(conversion: Conversion, seen: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Objects that were selected and that the output does not show, neither whole nor in parts."""
    paths = [o.path for checkpoint in seen for o in checkpoint.objects]
    shown = {path[:i] for path in paths for i in range(1, len(path) + 1)}
    whole = set(paths)
    chosen = conversion.selection.objects
    return tuple(o.name for o in chosen if o.path not in shown and not any(o.path[:i] in whole for i in range(1, len(o.path))))


def _require_readable(conversion: Conversion, location: str) -> Checkpoint:
    """Our own reader understands what was written there, and sees the tensors that were meant; what it sees."""
    checkpoint = open_snapshot(location, is_located=True).checkpoint
    found = {t.name: (t.spec.dtype, t.spec.shape) for t in checkpoint.tensors if t.name in conversion.plan.tensors}
    meant = {name: (t.dtype, t.source.spec.shape) for name, t in conversion.plan.tensors.items()}
    errors = [f for f in checkpoint.findings if f.is_error]
    if found != meant:
        differing = sorted(n for n in meant if found.get(n) != meant[n])
        errors += [Finding("missing-tensor", n, f"{meant[n][0]} {list(meant[n][1])}", "another or none") for n in differing[:20]]
    known = meant.keys() | conversion.selection.aliases.keys() | {t.name for t in conversion.carried}
    # a name for bytes that were to be written is no further tensor: ZeRO 3's weights are its masters
    known |= {name for group in checkpoint.aliases if not known.isdisjoint(group) for name in group}
    extra = sorted(t.name for t in checkpoint.tensors if t.name not in known)
    errors += [Finding("extra-tensor", n, "none of this name", "one that was not to be written") for n in extra[:20]]
    if errors:
        raise FindingsError(f"what was written does not read back: {conversion.destination}", errors)
    return checkpoint
