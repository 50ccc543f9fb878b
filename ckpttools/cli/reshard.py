"""`ckpttools reshard`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli import documents, options, render
from ckpttools.cli.replicas import replica_lines
from ckpttools.cli.session import take_roots
from ckpttools.errors import ExitCode
from ckpttools.model import Mesh
from ckpttools.units import render_bytes_short

if TYPE_CHECKING:
    from ckpttools.operations.reshard import Resharding

_TARGETS = (
    "dcp",
    "safetensors",
    "dtensor",
    "torch",
    "vllm",
    "llama",
    "deepspeed",
    "deepspeed-universal",
    "megatron-dist",
    "megatron-legacy",
)
"""Those of `operations.targets`, which is not loaded for a help text."""
_MAX_DROPPED = 12
_MAX_MADE_AGAIN = 6
_EPILOG = options.examples(
    "ckpttools reshard checkpoint/step-1000 restart/ --to dcp --mesh fsdp=48",
    "ckpttools reshard checkpoint/step-1000 restart/ --to dcp --mesh tp=2,fsdp=4 --dry-run",
    "ckpttools reshard checkpoint/step-1000 restart/ --to dcp --mesh dp=2,fsdp=4 --placements source",
    "ckpttools reshard run/iter_0001000 restart/iter_0001000 --to megatron-legacy --mesh tp=4,pp=2 --drop",
)


class _MeshType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on, and 8.1 is supported
    name = "mesh"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Mesh:
        try:
            mesh = value if isinstance(value, Mesh) else Mesh.parse(str(value))
        except ValueError as e:
            self.fail(str(e), param, ctx)
        if not mesh.axes:  # an empty variable in a script must not mean one rank
            self.fail("no axis is named (write it like tp=2,fsdp=4; fsdp=1 is one rank)", param, ctx)
        return mesh


def _stages(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        counts = tuple(int(n) for n in value.split(",")) if value else ()
    except ValueError as e:
        raise click.BadParameter(f"`{value}` is no list of numbers like 8,8,7") from e
    if any(n < 1 for n in counts):
        raise click.BadParameter("every stage has at least one layer")
    return counts


def _torch_release(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    from ckpttools.containers.dtensor_records import parse_release

    try:
        return value if value is None else ".".join(map(str, parse_release(value)))
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


def _axis_names(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> dict[str, str] | None:
    names = dict(text.partition("=")[::2] for text in value)
    for axis, name in names.items():
        if not (axis and name):
            raise click.BadParameter(f"`{axis}` has no name: write it like fsdp=dp_shard")
    return names or None


@click.command("reshard", epilog=_EPILOG)
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST")
@options.roots
@options.replicas
@click.option("--to", "target", type=click.Choice(_TARGETS), required=True, help="What to write.")
@click.option("--mesh", type=_MeshType(), required=True, metavar="AXES", help="Axes and sizes: fsdp=8, or tp=2,fsdp=4.")
@click.option(
    "--placements",
    metavar="RULES",
    help="A built-in set (llama, gpt2, ...), a TOML file, or `source` for how SRC was cut.  [default: by the names]",
)
@click.option("--pp-layers", callback=_stages, metavar="N,N,...", help="Layers of each pipeline stage.  [default: equal blocks]")
@click.option("--virtual-stages", type=click.IntRange(1, 1024), default=1, help="Chunks of layers per stage.")
@options.model_config
@click.option("--zero", type=click.IntRange(0, 3), help="ZeRO stage of the engine that resumes, with --to deepspeed; 0 for none.")
@click.option("--files-per-rank", type=click.IntRange(1, 1024), default=1, show_default=True, help="Data files of each rank.")
@click.option(
    "--max-part-size",
    "max_part_bytes",
    type=options.SIZE,
    metavar="SIZE",
    help="Divide a rank's safetensors file beyond this size.",
)
@click.option(
    "--torch-release",
    callback=_torch_release,
    metavar="X.Y",
    help="The torch that shall load pickled DTensors: 2.4 to 2.13.  [default: newest]",
)
@click.option(
    "--device-type", default="cpu", show_default=True, metavar="TYPE", help="Of the meshes of pickled DTensors: cuda, ..."
)
@click.option(
    "--axis-name",
    "axis_names",
    callback=_axis_names,
    multiple=True,
    metavar="AXIS=NAME",
    help="What the job calls an axis in the meshes of pickled DTensors.  [default: verl's names, dp=ddp]",
)
@options.choice
@options.names
@click.option(
    "--weights-only", is_flag=True, help="The model's tensors alone, without optimizer state and objects (but Megatron's `args`)."
)
@click.option("--drop", is_flag=True, help="Leave behind what the target cannot hold.")
@options.allow_findings
@options.output
@options.running
def command(
    src: str,
    dst: str,
    roots: tuple[str, ...],
    replicas: str,
    target: str,
    mesh: Mesh,
    placements: str | None,
    pp_layers: tuple[int, ...],
    model_config: str | None,
    allow_findings: tuple[str, ...],
    dry_run: bool,
    overwrite: bool,
    no_verify: bool,
    is_json: bool,
    jobs: int,
    memory: int,
    quiet: bool,
    verbose: bool,
    **details: Any,
) -> ExitCode:
    """Lay a checkpoint of any layout out for the ranks of a mesh: each rank finds its own share in files of its own.

    The axes are dp (replicas), fsdp (rows of everything), tp (by rules for each kind of tensor), ep (experts) and pp (stages
    of layers); ranks are numbered with tp varying fastest, then ep, fsdp, dp and pp. Nothing is computed: every tensor is
    copied, its digest compared with the source's, the output sealed, and only then given its name. Optimizer state and
    objects come along. An interrupted run goes on where it stopped when called again.
    """
    from ckpttools.operations.conversion import Manner
    from ckpttools.operations.naming import Naming
    from ckpttools.operations.place import Placing
    from ckpttools.operations.reshard import reshard
    from ckpttools.operations.select import Choice, Renaming
    from ckpttools.operations.targets import Details

    renaming = Renaming.parse(details.pop("strip_prefix"), details.pop("rename"))
    choice = Choice(details.pop("include"), details.pop("exclude"), details.pop("weights_only") or None, renaming)
    location, further = take_roots(src, roots)
    with render.late_progress("writing", is_quiet=quiet, is_verbose=verbose) as (report, set_total):
        resharding = reshard(
            location,
            dst,
            roots=further,
            replicas=replicas,
            target=target,
            mesh=mesh,
            choice=choice,
            naming=Naming(details.pop("names"), model_config, details.pop("settings")),
            placing=Placing(placements or "", pp_layers, model_config=model_config),
            is_dropping=details.pop("drop"),
            details=Details(**details),
            is_dry_run=dry_run,
            manner=Manner(allow_findings, overwrite, not no_verify, jobs, memory, report),
            on_plan=lambda plan: set_total(plan.bytes_written),
        )
    if is_json:
        render.write_json(documents.resharding(resharding))
    elif dry_run or not quiet:
        (_write_plan if dry_run else _write_summary)(resharding)
    return ExitCode.OK


def _write_plan(resharding: Resharding) -> None:
    """How each tensor is placed, what each rank draws on, and what would be written."""
    document = documents.resharding(resharding)
    placed = [("placement", "because", "tensor")]
    placed += [(t["placement"], t["reason"], t["tensor"]) for t in document["placements"]]
    for line in render.table(placed):
        render.write_data(line)
    render.write_data("")
    if document["rules"] == "source":  # the others can be looked up
        render.write_data(document["rules_toml"])
    rows = [("rank", "at", "bytes", "from")]
    for rank in document["ranks"]:
        drawn = ", ".join(f"{s['file']} ({render_bytes_short(s['bytes'])})" for s in rank["sources"][:4])
        more = ", ..." if len(rank["sources"]) > 4 else ""
        rows.append((str(rank["rank"]), rank["at"], str(rank["bytes"]), drawn + more))
    for line in render.table(rows, right=(0, 2)):
        render.write_data(line)
    render.write_data("")
    plan, destination = resharding.conversion.plan, resharding.conversion.destination
    needs = f"{render_bytes_short(plan.space_bytes)} and {plan.inodes} inodes of free space are needed"
    render.write_data(f"{render_bytes_short(plan.bytes_written)} would be written to {destination}; {needs}")
    _write_heard(resharding)


def _write_heard(resharding: Resharding) -> None:
    """What people should hear of the source and of names, and what is not in the output."""
    again = resharding.made_again
    if again:
        listed = ", ".join(again[:_MAX_MADE_AGAIN]) + (
            f", and {len(again) - _MAX_MADE_AGAIN} more" if len(again) > _MAX_MADE_AGAIN else ""
        )
        render.write_data(f"not written, since the engine makes them again: {listed}")
    for note in resharding.conversion.notes:
        render.write_data(note)
    for name in resharding.dropped[:_MAX_DROPPED]:
        render.write_data(f"dropped: {name}, which {resharding.target} cannot hold")
    more = len(resharding.dropped) - _MAX_DROPPED
    if more > 0:
        render.write_data(f"dropped: and {more} more, which --json lists")


def _write_summary(resharding: Resharding) -> None:
    conversion = resharding.conversion
    plan, seal = conversion.plan, conversion.seal
    _write_heard(resharding)
    for line in replica_lines(conversion.replicas):
        render.write_data(line)
    if conversion.resumed_bytes:
        render.write_data(f"resumed: {render_bytes_short(conversion.resumed_bytes)} were written by an earlier run")
    tensors, files = render.count(len(plan.tensors), "tensor"), render.count(len(plan.files), "file")
    ranks = render.count(resharding.assignment.mesh.ranks, "rank")
    text = f"{tensors}, {render_bytes_short(plan.bytes_written)} in {files} for {ranks} ({resharding.mesh})"
    render.write_data(f"{'already done' if conversion.was_done else 'wrote'} {conversion.destination}: {text}")
    if seal is not None:
        render.write_data(render.fingerprint_line(conversion.fingerprint, seal))
