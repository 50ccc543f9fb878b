"""`ckpttools consolidate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli import documents, options, render
from ckpttools.cli.replicas import replica_lines
from ckpttools.cli.session import take_roots
from ckpttools.dtypes import DType, parse_dtype
from ckpttools.errors import ExitCode
from ckpttools.units import render_bytes_short

if TYPE_CHECKING:
    from ckpttools.operations.conversion import Conversion

_EPILOG = options.examples(
    "ckpttools consolidate checkpoint/step-1000 model.safetensors --dtype bfloat16 --strip-prefix model.",
    "ckpttools consolidate checkpoint/step-1000 checkpoint.pt --format torch",
    "ckpttools consolidate checkpoint/step-1000 exported/ --max-shard-size 2GB --dry-run",
    "ckpttools consolidate '/nodes/*/step-1000' exported/",
)

_LOSSES = {
    "overflowed": "values became infinite",
    "saturated": "values became the largest finite one",
    "infinities_lost": "infinities became NaN",
    "nans_changed": "NaNs changed their payload or sign",
}


def _dtype(_ctx: click.Context, _param: click.Parameter, value: str | None) -> DType | None:
    try:
        found = parse_dtype(value) if value else None
    except ValueError as e:
        raise click.BadParameter(str(e)) from e
    if found is not None and not found.is_floating:
        raise click.BadParameter(f"`{value}` is not of floating point, and nothing else is cast")
    return found


def _require_one_size(dst: str, format_: str | None, *, is_single_file: bool) -> None:
    """Refuse a shard size where there is only one file for it to divide."""
    source = click.get_current_context().get_parameter_source("max_shard_size")
    is_one = is_single_file or format_ == "torch" or dst.endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt"))
    if is_one and source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
        raise click.UsageError("--max-shard-size divides safetensors output into several files, and here there is one")


@click.command("consolidate", epilog=_EPILOG)
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST")
@options.roots
@options.replicas
@click.option("--format", "format_", type=click.Choice(["safetensors", "torch"]), help="By DST's suffix, else safetensors.")
@options.max_shard_size
@click.option("--single-file", is_flag=True, help="One file, whatever its size.")
@click.option("--dtype", callback=_dtype, metavar="DTYPE", help="Cast floating-point tensors, rounding to nearest even.")
@click.option(
    "--weights",
    type=click.Choice(["model", "fp32"]),
    default="model",
    show_default=True,
    help="Of weights that training kept twice: in its own dtype, or the fp32 masters of the optimizer.",
)
@options.choice
@options.names
@options.model_config
@click.option(
    "--weights-only/--everything",
    default=None,
    help="The model's tensors alone, or all families and objects.  [default: weights for safetensors, everything for torch]",
)
@click.option("--expand-tied", is_flag=True, help="Write tied tensors under each of their names.")
@options.allow_findings
@options.output
@options.running
def command(
    src: str,
    dst: str,
    roots: tuple[str, ...],
    replicas: str,
    format_: str | None,
    max_shard_size: int,
    single_file: bool,
    dtype: DType | None,
    weights: str,
    allow_findings: tuple[str, ...],
    dry_run: bool,
    overwrite: bool,
    no_verify: bool,
    is_json: bool,
    jobs: int,
    memory: int,
    quiet: bool,
    verbose: bool,
    **said: Any,
) -> ExitCode:
    """Turn a checkpoint of any layout into portable files: safetensors (shards with an index) or one torch file.

    DST is a directory, or one file when its name ends in .safetensors, .pt, .pth, .bin or .ckpt. Nothing is computed:
    every tensor is copied, its digest compared with the source's, the output sealed, and only then given its name. Config
    and tokenizer files beside the source come along. An interrupted run goes on where it stopped when called again.
    SRC may be a glob, and --root names further places, when the files of the snapshot lie on the disks of several nodes.
    """
    from ckpttools.operations.convert import consolidate
    from ckpttools.operations.naming import Naming
    from ckpttools.operations.select import Choice, Renaming

    _require_one_size(dst, format_, is_single_file=single_file)
    renaming = Renaming.parse(said["strip_prefix"], said["rename"])
    choice = Choice(said["include"], said["exclude"], said["weights_only"], renaming, said["expand_tied"], weights)
    location, further = take_roots(src, roots)
    with render.late_progress("writing", is_quiet=quiet, is_verbose=verbose) as (report, set_total):
        conversion = consolidate(
            location,
            dst,
            roots=further,
            replicas=replicas,
            choice=choice,
            naming=Naming(said["names"], said["model_config"], said["settings"]),
            format=format_,
            max_shard_bytes=None if single_file else max_shard_size,
            dtype=dtype,
            allowed_findings=allow_findings,
            is_dry_run=dry_run,
            is_overwriting=overwrite,
            is_verifying=not no_verify,
            jobs=jobs,
            memory_bytes=memory,
            progress=report,
            on_plan=lambda plan: set_total(plan.bytes_written),
        )
    _write(conversion, is_json=is_json, is_quiet=quiet)
    return ExitCode.OK


def _write(conversion: Conversion, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        render.write_json(documents.conversion(conversion))
    elif conversion.seal is None:
        _write_plan(conversion)
    elif not is_quiet:
        _write_summary(conversion)


def _write_plan(conversion: Conversion) -> None:
    """Each file that would be written, and what it draws on."""
    rows = [("bytes", "tensors", "file", "from")]
    for file in documents.conversion(conversion)["files"]:
        sources = file["sources"]
        drawn = ", ".join(f"{s['file']} ({render_bytes_short(s['bytes'])})" for s in sources[:4])
        rows.append((str(file["bytes"]), str(file["tensors"]), file["path"], drawn + (", ..." if len(sources) > 4 else "")))
    for line in render.table(rows, right=(0, 1)):
        render.write_data(line)
    plan = conversion.plan
    needs = f"{render_bytes_short(plan.space_bytes)} and {plan.inodes} inodes of free space are needed"
    render.write_data(f"{render_bytes_short(plan.bytes_written)} would be written to {conversion.destination}; {needs}")


def _write_summary(conversion: Conversion) -> None:
    for name, counts in conversion.casts.items():
        lost = [f"{getattr(counts, field)} {text}" for field, text in _LOSSES.items() if getattr(counts, field)]
        if lost:
            render.write_data(f"warning: cast of {name}: {', '.join(lost)}")
    for alias, kept in conversion.selection.aliases.items():
        render.write_data(f"tied: {alias} is {kept}, written once")
    for note in conversion.notes:
        render.write_data(note)
    for line in replica_lines(conversion.replicas):
        render.write_data(line)
    plan, seal = conversion.plan, conversion.seal
    tensors, files = render.count(len(plan.tensors), "tensor"), render.count(len(plan.files), "file")
    counts_text = f"{tensors}, {render_bytes_short(plan.bytes_written)} in {files}"
    left = f"; {render.count(len(conversion.selection.left), 'tensor')} not taken" if conversion.selection.left else ""
    if conversion.resumed_bytes:
        render.write_data(f"resumed: {render_bytes_short(conversion.resumed_bytes)} were written by an earlier run")
    render.write_data(f"{'already done' if conversion.was_done else 'wrote'} {conversion.destination}: {counts_text}{left}")
    if seal is not None:
        render.write_data(render.fingerprint_line(conversion.fingerprint, seal))
