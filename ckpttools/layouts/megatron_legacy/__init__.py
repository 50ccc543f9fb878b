"""Megatron's legacy layout: one directory per model-parallel rank, put together into whole tensors with global numbers.

Read `MegatronLegacy.read` first: it is the story. `rules` is the table of how each tensor is cut, `resolution` finds what
a stored tensor is a share of, `assembly` puts shares together, `optimizer` and `buffers` find the names of optimizer state.

Source: NVIDIA/Megatron-LM, megatron/training/checkpointing.py, core_v0.16 and older; see the files of this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ckpttools.containers.torch_entries import open_rank_file
from ckpttools.findings import Finding
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.layouts.families import MODEL
from ckpttools.layouts.megatron_legacy.arguments import Arguments, disagreements, parallel
from ckpttools.layouts.megatron_legacy.assembly import Assembly
from ckpttools.layouts.megatron_legacy.model import add_model
from ckpttools.layouts.megatron_legacy.names import BUFFER_FILE, MODEL_FILES, Parallel, Place, RankPath, is_shard, parse_path
from ckpttools.layouts.megatron_legacy.numbering import number_layers
from ckpttools.layouts.megatron_legacy.optimizer import add_optimizer
from ckpttools.layouts.megatron_legacy.shards import CHUNK_KEY, Shard, TensorReader, check_steps, read_chunks, top_level
from ckpttools.layouts.megatron_legacy.sizes import check_sizes
from ckpttools.model import Commit, FileEntry
from ckpttools.storage.source import Listing, Source

_MAX_NAMED_RANKS = 64


class MegatronLegacy:
    """`mp_rank_*` directories of torch files."""

    name = "megatron_legacy"
    looks_for = "`mp_rank_<TT>[_<PPP>][_<EEE>]/model_optim_rng.pt` (or `model_rng.pt`), one directory per model-parallel rank"

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """One part: all files of all ranks."""
        paths = [p for f in listing if f.is_regular and (p := parse_path(f.path))]
        if not any(p.file_name in MODEL_FILES for p in paths):
            return []
        return [Part(self.name, MODEL, tuple(p.path for p in paths))]

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """Open every rank's files, tell the mesh, number the layers, and put the shares together."""
        paths = [p for file in part.files if (p := parse_path(file))]
        shards, mesh, findings = _open(source, listing, paths)
        models = [s for s in shards if s.path.file_name in MODEL_FILES]
        findings += [*_missing(mesh, models, shards), *check_steps(models), *_disagreeing(models)]
        reader, assembly = TensorReader(), Assembly()
        for shard in models:
            shard.chunks = read_chunks(shard, reader)
        arguments = models[0].arguments if models else Arguments()
        numbering, miscounts = number_layers((c for s in models for c in s.chunks), mesh, arguments)
        placed = add_model(models, numbering, mesh, assembly)
        add_optimizer(shards, placed, mesh, assembly, reader)
        _add_objects(models, mesh, assembly, reader)
        tensors = tuple(assembly.tensors())
        findings += [*miscounts, *reader.findings, *assembly.findings, *check_sizes(arguments, mesh, tensors)]
        missing = [f for f in findings if f.code == "missing-rank"]
        return Contents(
            tensors=tensors,
            objects=assembly.objects(),
            files=tuple(FileEntry(p.path, listing.length_bytes(p.path), "data") for p in paths),
            findings=tuple(findings),
            mesh=mesh.mesh(),
            step=next((s.step for s in models if s.step is not None), None),
            written_by=_written_by(models),
            commit=Commit(not missing, f"{missing[0].where} is absent" if missing else ""),
            checksums=tuple(c for s in shards for c in s.file.torch.checksums),
        )


LAYOUT = MegatronLegacy()


def _open(source: Source, listing: Listing, paths: Sequence[RankPath]) -> tuple[list[Shard], Parallel, list[Finding]]:
    """Every file opened, in the order of ranks; what cannot be opened is a finding and no shard."""
    opened = []
    findings: list[Finding] = []
    for path in paths:
        file = open_rank_file(source, path.path, listing.length_bytes(path.path))
        top, bad = top_level(file) if path.file_name in MODEL_FILES else ({}, [])
        findings += [*file.torch.findings, *bad]
        opened.append((path, file, top, Arguments.read(top.get("args"))))
    models = [(path, arguments) for path, _, _, arguments in opened if path.file_name in MODEL_FILES]
    stated = next((arguments for _, arguments in models if arguments.tp), Arguments())
    mesh = parallel(stated, [path for path, _ in models])
    shards: dict[tuple[Place, str], Shard] = {}
    for path, file, top, arguments in opened:
        place = Place(0, 0, path.numbers[-1]) if is_shard(path) else mesh.place(path)
        key = (place or Place(0, 0, 0), path.path if is_shard(path) else path.file_name)
        if place is None:
            expected = f"a rank of tp={mesh.tp}, pp={mesh.pp}, ep={mesh.ep}, as the arguments state"
            findings.append(Finding("rank-mismatch", path.path, expected, path.directory))
        elif key in shards:
            found = f"`{shards[key].path.path}` of the same rank"
            findings.append(Finding("rank-mismatch", path.path, "one file of each rank", found))
        else:
            shards[key] = Shard(path, place, file, top, arguments)
    return sorted(shards.values(), key=lambda s: s.place), mesh, findings


def _missing(mesh: Parallel, models: Sequence[Shard], shards: Sequence[Shard]) -> list[Finding]:
    """A finding per absent file of a rank: the model's, and the optimizer's where any rank has one or should."""
    names = [models[0].path.file_name if models else MODEL_FILES[0]]
    buffers = {s.place for s in shards if s.path.file_name == BUFFER_FILE and not is_shard(s.path)}
    if buffers:
        names.append(BUFFER_FILE)
    there = {(s.place, s.path.file_name) for s in shards if not is_shard(s.path)}
    if mesh.etp != mesh.tp and _is_enough(mesh, models):
        return []
    absent = [f"{mesh.directory(place)}/{name}" for place in mesh.places() for name in names if (place, name) not in there]
    expected = f"one of each of {len(mesh.places())} ranks ({mesh.mesh()})"
    found = f"{len(models)} of {len(mesh.places())}"
    return [Finding("missing-rank", path, expected, found) for path in absent[:_MAX_NAMED_RANKS]]


def _is_enough(mesh: Parallel, models: Sequence[Shard]) -> bool:
    """Where experts are cut into other parts than the rest, not every combination of ranks is saved: each part once is enough."""
    there = {s.place for s in models}
    stages = range(mesh.pp)
    has_dense = all(any(p.pp == pp and p.tp == tp for p in there) for pp in stages for tp in range(mesh.tp))
    has_experts = all(any(p.pp == pp and p.ep == ep for p in there) for pp in stages for ep in range(mesh.ep))
    return has_dense and has_experts


def _disagreeing(models: Sequence[Shard]) -> list[Finding]:
    found = disagreements((s.path.path, s.arguments) for s in models if s.arguments.values)
    first = models[0].path.path if models else ""
    return [
        Finding("rank-mismatch", f"args.{name} in {file}", f"{expected}, as in {first}", str(value))
        for file, name, expected, value in found
    ]


def _add_objects(models: Sequence[Shard], mesh: Parallel, assembly: Assembly, reader: TensorReader) -> None:
    """What is neither model nor optimizer: random states are each rank's own, the rest is the first rank's."""
    for shard in models:
        for key, value in shard.top.items():
            if not isinstance(key, str) or CHUNK_KEY.fullmatch(key) or key == "optimizer":
                continue
            prefix = (key, shard.path.directory) if key in ("rng_state", "rerun_state_machine") else (key,)
            on_tensor = partial(assembly.add_whole, rank=shard.place.rank(mesh))
            reader.read_tree(shard.file, prefix, value, on_tensor, assembly.add_object)


def _written_by(models: Sequence[Shard]) -> str:
    version = models[0].version if models else 0.0
    return f"Megatron-LM, checkpoint version {version:g}"
