"""Every layout that can be read, and `open`: a location becomes one `Checkpoint`.

A snapshot is made of parts (model, optimizer, ...), each claimed by one layout. `open` asks every layout of the registry
what it recognises, reads the parts and puts them together: names of the model as stored, other families under their
own name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckpttools.containers import collector, items
from ckpttools.containers.copies import with_copies, with_roots
from ckpttools.containers.strangers import tell_by_name
from ckpttools.errors import NotRecognisedError
from ckpttools.findings import WARNING, Finding
from ckpttools.layouts import (
    dcp,
    dcp_hf,
    deepspeed,
    hf_bin,
    llama,
    megatron_dist,
    megatron_legacy,
    per_rank,
    safetensors,
    torch,
    vllm,
)
from ckpttools.layouts.base import Contents, Layout, Part
from ckpttools.layouts.checks import check_covers, check_data, check_names, find_aliases
from ckpttools.layouts.families import MODEL, families_of_keys, is_known_stem
from ckpttools.layouts.inner import Inner, below, find_inner
from ckpttools.model import Checkpoint, FileEntry, Mesh, ObjectEntry, Path, TensorEntry, render_path
from ckpttools.storage.source import Listing, Source, open_source, read
from ckpttools.storage.union import UnionSource, require_apart

REGISTRY: tuple[Layout, ...] = (
    megatron_dist.LAYOUT,
    dcp.LAYOUT,
    dcp_hf.LAYOUT,
    deepspeed.LAYOUT,
    vllm.LAYOUT,
    safetensors.LAYOUT,
    llama.LAYOUT,
    hf_bin.LAYOUT,
    per_rank.LAYOUT,
    megatron_legacy.LAYOUT,
    torch.LAYOUT,
)
"""In the order in which they may claim a file: a file belongs to the first layout that recognises it."""

SEAL_NAME = "ckpttools-seal.json"
_MANIFEST_NAMES = re.compile(r"\.metadata|__\d+\.metadata|.*\.index(\..+)?\.json")
_STEP_IN_NAME = re.compile(r"(?:step|iter(?:ation)?|checkpoint)[-_=]?0*(\d+)")
_UNREADABLE = frozenset(
    {
        *("bad-header", "bad-json", "bad-pickle", "bad-container", "pickle-limit", "unsafe-pickle", "unsupported-container"),
        *("duplicate-name", "extent-overlap", "extent-gap", "trailing-bytes", "file-too-short", "empty-file"),
        *("storage-mismatch", "unknown-dtype", "unreadable-file", "checksum-mismatch"),
    }
)
"""What is wrong with one file by itself, so that a copy of it may be better."""
_LEFTOVERS = (".tmp", ".incomplete", ".part")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An opened snapshot: what it means, and where to read its values."""

    source: Source
    listing: Listing
    checkpoint: Checkpoint
    is_single_file: bool = False
    """Whether the location named one file, whose seal lies beside it."""


def open_snapshot(location: str, *, roots: Sequence[str] = (), is_located: bool = False) -> Snapshot:
    """What the snapshot at a location (a directory, a single file or a URL) means.

    Args:
        roots: further places that hold files of the same snapshot, as the disks of nodes do (`storage.union`).
        is_located: open every item too, so that pieces have their exact places (`containers.items`).

    Raises:
        NotFoundError: when nothing is there.
        NotRecognisedError: when no layout knows what is there, or nothing says which of several files is meant.
        StorageError: when the storage fails.
        UsageError: when one root lies in another.
    """
    with collector.paused():
        return _open((location, *roots), is_located)


def _open(locations: tuple[str, ...], is_located: bool) -> Snapshot:
    require_apart(locations)
    opened = [_open_root(location) for location in locations]
    roots, sources = tuple(root for _, _, root in opened), [source for source, _, _ in opened]
    snapshot = _read(sources[0], roots, is_located) if len(roots) == 1 else _read_sound(sources, roots, is_located)
    checkpoint = replace(snapshot.checkpoint, findings=with_roots(snapshot.checkpoint.findings, snapshot.checkpoint.files))
    return replace(snapshot, checkpoint=checkpoint, is_single_file=len(roots) == 1 and bool(opened[0][1]))


def _read(source: Source, roots: tuple[str, ...], is_located: bool) -> Snapshot:
    listing = source.listing()
    parts = sniff(source, listing)
    has_model = any(p.family == MODEL for p in parts)
    inner = [] if has_model else find_inner(source, listing.without_shadows, sniff)
    if not parts and not inner:
        raise _not_recognised(", ".join(roots), listing)
    if not has_model and not inner and len(parts) > 1:
        _require_known(roots[0], parts)
    checkpoint = _put_together(source, listing, parts, inner, roots[0])
    if len(roots) > 1:
        checkpoint = with_copies(source, checkpoint, listing)
        checkpoint = replace(checkpoint, roots=roots, findings=(*checkpoint.findings, *_check_steps(roots)))
    if is_located:
        checkpoint = items.locate(source, checkpoint)
    return Snapshot(source, listing, checkpoint)


def _read_sound(sources: Sequence[Source], roots: tuple[str, ...], is_located: bool) -> Snapshot:
    """What several roots hold together. Of a file whose first copy does not read, another copy is the file, if it reads.

    The copy that was passed over then differs from the file, and is told as copies that differ are.
    """
    snapshot = _read(UnionSource(sources), roots, is_located)
    passed_over: dict[tuple[str, str], Finding] = {}
    for _ in roots[1:]:
        doubtful = _doubtful(snapshot)
        if not doubtful:
            break
        other = _read(UnionSource(sources, passed_over=[*passed_over, *doubtful]), roots, is_located)
        if len(_doubtful(other)) >= len(doubtful):
            break
        passed_over |= doubtful
        snapshot = other
    findings = _about_copies(snapshot, {f"{root}/{path}": f for (root, path), f in passed_over.items()})
    return replace(snapshot, checkpoint=replace(snapshot.checkpoint, findings=findings))


def _about_copies(snapshot: Snapshot, passed_over: dict[str, Finding]) -> tuple[Finding, ...]:
    """The findings, those about copies that do not read told as copies that differ from the file, which reads.

    Args: passed_over: place of a copy -> what is wrong with it.
    """
    bad = {path for _, path in _doubtful(snapshot)}
    places = {copy.path for path, copies in snapshot.listing.copies.items() if path not in bad for copy in copies}
    rest, told = [], dict(passed_over)
    for finding in snapshot.checkpoint.findings:
        about = places.intersection(_words(finding)) if finding.is_error and finding.code in _UNREADABLE else ()
        for place in about:
            told.setdefault(place, finding)
        rest += [] if about else [finding]
    known = {word for f in rest if f.code == "replica-mismatch" for word in _words(f)}
    new = [
        Finding("replica-mismatch", place, "a copy that reads as the others do", f"{f.code}: {f.found}")
        for place, f in told.items()
        if place not in known
    ]
    return (*rest, *new)


def _doubtful(snapshot: Snapshot) -> dict[tuple[str, str], Finding]:
    """(root, path) of files that do not read and of which there are copies, each with what is wrong with it."""
    listing = snapshot.listing
    found: dict[tuple[str, str], Finding] = {}
    for finding in snapshot.checkpoint.findings:
        if finding.is_error and finding.code in _UNREADABLE:
            for path in _words(finding):
                if path in listing.files and path in listing.copies:
                    found.setdefault((listing.files[path].root, path), finding)
    return found


def _words(finding: Finding) -> list[str]:
    return re.findall(r"[^\s`]+", finding.where)


def _open_root(location: str) -> tuple[Source, str, str]:
    """(source, file, location) of a root; a manifest stands for the directory that it describes."""
    source, file = open_source(location)
    if file and _MANIFEST_NAMES.fullmatch(file):
        location = location[: -len(file)].rstrip("/") or "."
        source, file = open_source(location)
    return source, file, location


def _check_steps(roots: Sequence[str]) -> list[Finding]:
    """A finding per root whose name has another step than that of the first."""
    steps = [(root, found.group(1)) for root in roots if (found := _STEP_IN_NAME.search(root.rstrip("/").rpartition("/")[2]))]
    return [
        Finding("step-mismatch", root, f"step {int(steps[0][1])}, as in {steps[0][0]}", f"step {int(step)}")
        for root, step in steps
        if int(step) != int(steps[0][1])
    ]


def open_checkpoint(location: str, *, roots: Sequence[str] = ()) -> Checkpoint:
    """What the snapshot at a location means, with the exact place of every piece; reads no tensor's values.

    Raises: NotFoundError, NotRecognisedError, StorageError: see `open_snapshot`.
    """
    return open_snapshot(location, roots=roots, is_located=True).checkpoint


def sniff(source: Source, listing: Listing) -> list[Part]:
    """The parts of a snapshot, each file in one of them; the model first."""

    listing = listing.without_shadows

    def peek(path: str) -> bytes:
        return read(source, path, 0, min(64, listing.length_bytes(path)))

    claimed: set[str] = {p for p in listing.files if p.rpartition("/")[2] == SEAL_NAME}
    parts: list[Part] = []
    for layout in REGISTRY:
        for part in layout.sniff(listing, peek):
            if not claimed.intersection(part.files):
                claimed.update(part.files)
                parts.append(part)
    return sorted(parts, key=lambda p: p.family != MODEL)


def _read_parts(
    source: Source, listing: Listing, parts: Sequence[Part], inner: Sequence[Inner]
) -> Iterator[tuple[Part, str, Contents]]:
    """Each part with its family and what it holds: those of directories first, since the model is in one of them."""
    layouts = {layout.name: layout for layout in REGISTRY}
    for place in inner:
        for part in place.parts:
            contents = layouts[part.layout].read(place.source, place.listing, part)
            family = place.family(part, is_only=len(inner) == 1)
            if contents.families_are_told and len(inner) > 1:
                contents = replace(contents, families_are_told=False)
            yield part, family, below(contents, place.listing, place.directory)
    for part in parts:
        yield part, part.family, layouts[part.layout].read(source, listing.without_shadows, part)


def _put_together(source: Source, listing: Listing, parts: Sequence[Part], inner: Sequence[Inner], location: str) -> Checkpoint:
    findings: list[Finding] = []
    tensors: list[TensorEntry] = []
    objects: list[ObjectEntry] = []
    contents: list[Contents] = []
    families: set[str] = set()
    for part, family, read_part in _read_parts(source, listing, parts, inner):
        if family in families:
            family = _other_name(part, families)
            expected = f"one {part.family} in a snapshot"
            findings.append(Finding("duplicate-weights", part.files[0], expected, f"another one, listed as `{family}`"))
        families.add(family)
        named = _under_family(read_part, family)
        contents.append(named)
        tensors += named.tensors
        objects += named.objects
        findings += named.findings
    main = contents[0]
    findings += check_names(tensors)
    findings += check_data(tensors, main)
    findings += check_covers(tensors)
    files = _files(listing, contents)
    findings += _leftovers(listing, files)
    return Checkpoint(
        path=location,
        layout=(inner[0].parts if inner else parts)[0].layout,
        tensors=tuple(tensors),
        objects=tuple(objects),
        files=files,
        mesh=next((c.mesh for c in contents if c.mesh.axes), Mesh()),
        step=_step(source, listing, contents, location),
        written_by=_written_by(main, listing),
        commit=next((c.commit for c in contents if not c.commit.is_committed), main.commit),
        findings=tuple(findings),
        aliases=find_aliases(tensors),
        checksums=tuple(x for c in contents for x in c.checksums),
        trees={path: tree for c in contents for path, tree in c.trees.items()},
    )


def _other_name(part: Part, families: set[str]) -> str:
    """A family name for a part whose family is taken: the stem of its first file."""
    stem = part.files[0].rpartition("/")[2].partition(".")[0] or part.layout
    return stem if stem not in families else f"{stem}_{part.layout}"


def _under_family(contents: Contents, family: str) -> Contents:
    """The contents with every entry's family told, and named below it unless it is the model's."""
    if contents.families_are_told:
        return contents
    if family == MODEL:
        keys = families_of_keys(_paths(contents))
        tensors = [replace(t, family=keys.get(t.path[0], MODEL)) if t.path else t for t in contents.tensors]
        objects = [replace(o, family=keys.get(o.path[0], MODEL)) if o.path else o for o in contents.objects]
        return replace(contents, tensors=tuple(tensors), objects=tuple(objects))
    paths = _paths(contents)
    prefix: Path = () if paths and all(p[:1] == (family,) for p in paths) else (family,)
    tensors = [_named_tensor(t, (*prefix, *t.path), family) for t in contents.tensors]
    objects = [replace(o, name=render_path((*prefix, *o.path)), path=(*prefix, *o.path), family=family) for o in contents.objects]
    trees = {(*prefix, *path): tree for path, tree in contents.trees.items()}
    return replace(contents, tensors=tuple(tensors), objects=tuple(objects), trees=trees)


def _paths(contents: Contents) -> list[Path]:
    return [*(t.path for t in contents.tensors), *(o.path for o in contents.objects)]


def _named_tensor(entry: TensorEntry, path: Path, family: str) -> TensorEntry:
    return replace(entry, spec=replace(entry.spec, name=render_path(path)), path=path, family=family)


def _files(listing: Listing, contents: Sequence[Contents]) -> tuple[FileEntry, ...]:
    """Every file: those that parts claimed, ours, and companions that come along; each with its root."""
    claimed = {f.path: f for c in contents for f in c.files}
    rest = [
        FileEntry(f.path, f.length_bytes, "seal" if f.path.rpartition("/")[2] == SEAL_NAME else "companion")
        for f in listing
        if f.path not in claimed
    ]
    files = sorted((*claimed.values(), *rest), key=lambda f: f.path)
    return tuple(replace(f, root=listed.root) if (listed := listing.find(f.path)) and listed.root else f for f in files)


def _leftovers(listing: Listing, files: Sequence[FileEntry]) -> list[Finding]:
    """Marks of a save or a download that is going on or died, and names that are no regular files."""
    found = [
        Finding(
            "unfinished-save", f.path, "no temporary file in a finished snapshot", f"{f.length_bytes} bytes", severity=WARNING
        )
        for f in files
        if f.path.endswith(_LEFTOVERS)
    ]
    special = [f for f in listing if not f.is_regular]
    return found + [Finding("special-file", f.path, "a regular file", f.kind, severity=WARNING) for f in special]


def _step(source: Source, listing: Listing, contents: Sequence[Contents], location: str) -> int | None:
    """The step: as a file states it, else as HF Trainer's state does, else as the name has it."""
    stated = next((c.step for c in contents if c.step is not None), None)
    if stated is None and "trainer_state.json" in listing and listing.files["trainer_state.json"].is_regular:
        try:
            state = json.loads(read(source, "trainer_state.json", 0, listing.length_bytes("trainer_state.json")))
            step = state.get("global_step")
            stated = step if type(step) is int else None
        except (ValueError, AttributeError, RecursionError):
            stated = None
    named = _STEP_IN_NAME.search(location.rstrip("/").rpartition("/")[2])
    return stated if stated is not None else int(named.group(1)) if named else None


def _written_by(main: Contents, listing: Listing) -> str:
    """The tool, told by files that only it writes, in front of what the data files say."""
    marks = (
        ("trainer_state.json", "transformers Trainer"),
        ("fsdp_config.json", "verl"),
        ("custom_checkpoint_0.pkl", "accelerate"),
    )
    system = next((name for file, name in marks if file in listing), "")
    return f"{system}, {main.written_by}" if system and main.written_by else system or main.written_by


def _require_known(location: str, parts: Sequence[Part]) -> None:
    """Refuse a directory of several torch files of which none is known to be the model."""
    unknown = [p for p in parts if p.layout == "torch" and not is_known_stem(p.files[0].rpartition(".")[0])]
    if unknown:
        names = ", ".join(p.files[0] for p in unknown[:8]) + (", ..." if len(unknown) > 8 else "")
        raise NotRecognisedError(
            f"several torch files and nothing that says which is meant: {location}", found=names, hints=["name the file itself"]
        )


def _not_recognised(location: str, listing: Listing) -> NotRecognisedError:
    names = [f.path for f in listing]
    known = tell_by_name(names)
    if known is not None:
        path, stranger = known
        return NotRecognisedError(
            f"no checkpoint recognised: {location}", found=f"{path}: {stranger.what}", hints=[stranger.remedy]
        )
    seen = ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "") if names else "no files"
    return NotRecognisedError(
        f"no checkpoint recognised: {location}",
        found=seen,
        hints=[f"{layout.name} looks for {layout.looks_for}" for layout in REGISTRY],
    )


__all__ = ["REGISTRY", "SEAL_NAME", "Snapshot", "open_checkpoint", "open_snapshot", "sniff"]
