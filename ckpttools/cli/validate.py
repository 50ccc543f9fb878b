"""`ckpttools validate`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ckpttools.cli import documents, options, render
from ckpttools.cli.session import snapshot_bytes, take_roots, take_with_findings
from ckpttools.errors import ExitCode
from ckpttools.operations.validate import Validation
from ckpttools.units import render_bytes_short

_EXIT_CODES = {
    "ok": ExitCode.OK,
    "damaged": ExitCode.WRONG,
    "different": ExitCode.WRONG,
    "incomplete": ExitCode.INCOMPLETE,
}
_EPILOG = options.examples(
    "ckpttools validate checkpoint/step-1000",
    "ckpttools validate checkpoint/step-1000 --depth commit",
    "ckpttools validate exported/ --against checkpoint/step-1000 --allow-missing",
    "ckpttools validate /nodes/a/step-1000 --root /nodes/b/step-1000",
)


@click.command("validate", epilog=_EPILOG)
@options.path
@options.roots
@click.option(
    "--depth",
    type=click.Choice(["commit", "structure", "full"]),
    default="full",
    help="commit: the files are there. structure: every container opens and every tensor is covered. full: every byte is read.",
)
@click.option("--against", metavar="OTHER", help="A seal, a hash list or another snapshot: are the tensors the same?")
@click.option("--allow-missing", is_flag=True, help="With --against: tensors that only one side has are notes, not errors.")
@click.option("--finite", is_flag=True, help="Also look for NaN and infinity (warnings).")
@options.running
def command(
    path: str,
    roots: tuple[str, ...],
    depth: str,
    against: str | None,
    allow_missing: bool,
    finite: bool,
    is_json: bool,
    jobs: int,
    memory: int,
    quiet: bool,
    verbose: bool,
) -> ExitCode:
    """Check that a snapshot is whole: committed, complete, undamaged, and as its seal says if it has one.

    In a run directory a tracker that names a snapshot that is not there is an error too, since trainers restart from it.
    Stored checksums and replicas on different ranks are compared with the bytes. Without a seal or --against, a flipped
    bit in a file whose format has no checksum (safetensors, files of torch before 1.6) cannot be seen.
    """
    from ckpttools.operations.validate import validate

    if depth != "full" and (against or finite):
        raise click.UsageError("--against and --finite read every value, so they need --depth full")
    location, further, known = take_with_findings(path, roots)
    other, other_roots = take_roots(against, ()) if against else (None, ())
    total_bytes = snapshot_bytes(location, further) if depth == "full" else 0
    with render.progress("validating", total_bytes, is_quiet=quiet, is_verbose=verbose) as report:
        result = validate(
            location,
            roots=further,
            known=known,
            depth=depth,
            against=other,
            against_roots=other_roots,
            allow_missing=allow_missing,
            finite=finite,
            jobs=jobs,
            memory_bytes=memory,
            progress=report,
        )
    if is_json:
        render.write_json(documents.validate(result))
    elif not (quiet and result.verdict == "ok"):
        render.write_findings(f for f in result.findings if verbose or f.severity != "note")
        for line in [] if verbose else _one_sided(result):
            render.write_data(line)
        render.write_data(_summary(result))
    if any(f.code == "unreadable-file" and f.is_error for f in result.findings):
        return ExitCode.FAILED  # the storage refused, so nothing is known of the snapshot itself
    return _EXIT_CODES[result.verdict]


def _one_sided(result: Validation) -> Iterator[str]:
    """What --allow-missing let pass, in a line per side."""
    for code, side in (("missing-tensor", "only in the other"), ("extra-tensor", "only in this one")):
        names = [f.where for f in result.findings if f.code == code and f.severity == "note"]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"note: {render.count(len(names), 'tensor')} {side}: {', '.join(names[:3])}{more}"


def _summary(result: Validation) -> str:
    """One line that says what was looked at, so that ok is never taken for more than it is."""
    checkpoint = result.checkpoint
    looked = f"{render.count(len(checkpoint.tensors), 'tensor')} in {render.count(len(checkpoint.files), 'file')}"
    if result.depth == "full":
        proofs = [f"{result.checksums} checksums"] if result.checksums else ["no checksums in this format"]
        proofs += ["seal"] if result.is_sealed else []
        looked = f"{looked}, {render_bytes_short(result.bytes_read)} read ({', '.join(proofs)})"
    errors = sum(f.is_error for f in result.findings)
    remarks = len(result.findings) - errors
    counts = [render.count(errors, "error")] if errors else []
    counts += [render.count(remarks, "remark")] if remarks else []
    return f"{result.verdict}: {checkpoint.path}: {result.depth}: {looked}" + (f"; {', '.join(counts)}" if counts else "")
