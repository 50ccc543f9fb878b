"""`ckpttools inspect`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import click

from ckpttools.cli import documents, options, render
from ckpttools.cli.session import take_roots
from ckpttools.errors import ExitCode
from ckpttools.model import Checkpoint
from ckpttools.units import render_bytes_short

_EPILOG = options.examples(
    "ckpttools inspect checkpoint/step-1000",
    "ckpttools inspect model.safetensors --tensors",
    "ckpttools inspect run/ --json --tensors",
    "ckpttools inspect '/nodes/*/step-1000' --files",
)


@click.command("inspect", epilog=_EPILOG)
@options.path
@options.roots
@click.option("--tensors", is_flag=True, help="List every tensor: dtype, shape, bytes, pieces.")
@click.option("--rules", is_flag=True, help="With --tensors: by which rule the pieces of each were put together.")
@click.option("--files", is_flag=True, help="List every file: bytes, role, family.")
@click.option("--ranks", is_flag=True, help="List what each rank wrote.")
@click.option("--objects", is_flag=True, help="List what is not a tensor: settings, random states, arguments.")
@options.json_output
@options.verbose
def command(
    path: str,
    roots: tuple[str, ...],
    tensors: bool,
    rules: bool,
    files: bool,
    ranks: bool,
    objects: bool,
    is_json: bool,
    verbose: bool,
) -> ExitCode:
    """Say what a checkpoint is: layout, tool that wrote it, step, mesh, counts and bytes.

    Reads manifests and headers only, never a tensor's values; what is wrong with them is listed. Use `validate` to check
    the values.
    """
    from ckpttools.layouts import open_snapshot

    location, further = take_roots(path, roots)
    checkpoint = open_snapshot(location, roots=further, is_located=tensors or objects).checkpoint
    if is_json:
        render.write_json(documents.inspect(checkpoint, has_tensors=tensors, has_rules=rules))
    else:
        sections = [_summary(checkpoint)]
        sections += [_tensors(checkpoint, has_rules=rules)] if tensors else []
        sections += [_objects(checkpoint)] if objects else []
        sections += [_files(checkpoint)] if files else []
        sections += [_ranks(checkpoint)] if ranks else []
        for i, section in enumerate(sections):
            for line in ["", *section] if i else section:
                render.write_data(line)
        render.write_findings(f for f in checkpoint.findings if verbose or f.severity != "note")
    errors = [f for f in checkpoint.findings if f.is_error]
    if not errors:
        return ExitCode.OK
    return ExitCode.INCOMPLETE if all(f.is_incompleteness for f in errors) else ExitCode.WRONG


def _summary(checkpoint: Checkpoint) -> Iterator[str]:
    dtypes = Counter(t.spec.dtype.name for t in checkpoint.tensors)
    roles = Counter(f.role for f in checkpoint.files)
    total = sum(f.length_bytes for f in checkpoint.files)
    commit = checkpoint.commit
    facts = [
        ("path", ", ".join(checkpoint.roots) or checkpoint.path),
        ("layout", checkpoint.layout),
        ("written by", checkpoint.written_by or "unknown"),
        ("step", "unknown" if checkpoint.step is None else str(checkpoint.step)),
        ("committed", ("yes" if commit.is_committed else "no") + (f" ({commit.record})" if commit.record else "")),
        ("mesh", str(checkpoint.mesh) or "not recorded"),
        ("tensors", f"{len(checkpoint.tensors)}, {render_bytes_short(checkpoint.tensor_bytes)}: {_counts(dtypes)}"),
        ("objects", str(len(checkpoint.objects))),
        ("files", f"{len(checkpoint.files)}, {render_bytes_short(total)}: {_counts(roles)}"),
    ]
    families: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for tensor in checkpoint.tensors:
        families[tensor.family][0] += 1
        families[tensor.family][1] += tensor.spec.length_bytes
    if len(families) > 1:
        facts += [(f"  {family}", f"{n} tensors, {render_bytes_short(size)}") for family, (n, size) in families.items()]
    if checkpoint.aliases:
        facts.append(("tied", "; ".join(" = ".join(group) for group in checkpoint.aliases[:4])))
    yield from render.table([(f"{name}:", value) for name, value in facts])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counter.most_common()) or "none"


def _tensors(checkpoint: Checkpoint, *, has_rules: bool) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("dtype", "shape", "bytes", "pieces", *(("rule",) if has_rules else ()), "name")]
    for t in checkpoint.tensors:
        pieces = str(len(t.pieces)) + (f" + {len(t.replicas)} copies" if t.replicas else "")
        name = t.name + (f"  (part of {t.part_of})" if t.part_of else "")
        rule = (t.rule or "as stored",) if has_rules else ()
        rows.append((t.spec.dtype.name, str(list(t.spec.shape)), str(t.spec.length_bytes), pieces, *rule, name))
    yield from render.table(rows, right=(2,))


def _objects(checkpoint: Checkpoint) -> Iterator[str]:
    yield from render.table([("kind", "name"), *((o.kind, o.name) for o in checkpoint.objects)])


def _files(checkpoint: Checkpoint) -> Iterator[str]:
    rows = [(str(f.length_bytes), f.role, f.family if f.role in ("data", "objects") else "", f.place) for f in checkpoint.files]
    yield from render.table([("bytes", "role", "family", "path"), *rows], right=(0,))


def _ranks(checkpoint: Checkpoint) -> Iterator[str]:
    """Per writing rank its files, pieces and bytes; pieces of layouts that do not tell stand under `?`."""
    files: dict[str, set[str]] = defaultdict(set)
    counts: Counter[str] = Counter()
    lengths: Counter[str] = Counter()
    for tensor in checkpoint.tensors:
        for piece in (*tensor.pieces, *tensor.replicas):
            rank = "?" if piece.rank is None else str(piece.rank)
            files[rank].add(piece.extent.file)
            counts[rank] += 1
            lengths[rank] += piece.extent.length
    rows = [(r, str(len(files[r])), str(counts[r]), str(lengths[r])) for r in sorted(files, key=lambda r: (len(r), r))]
    yield from render.table([("rank", "files", "pieces", "bytes"), *rows], right=(0, 1, 2, 3))
