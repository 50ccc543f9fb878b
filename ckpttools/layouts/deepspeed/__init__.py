"""DeepSpeed: every ZeRO stage, pipelines, experts and universal checkpoints become one logical model.

A weight is in the dtype that training used; `optimizer.state.<name>.fp32` is its master, `.exp_avg` and so on its state. A flat
partition is boxes of the parameters in it, so nothing is put together in memory. Read `read` first; one story per module:
`names` (files), `ranks` (which there must be), `partitions` (ZeRO 1 and 2), `stage3`, `unflattened` and `counted` (ZeRO off),
`modules` (weights, pipeline layers, experts), `universal`, `tensor_parallel`, `settings`.

Source: deepspeedai/DeepSpeed, v0.19.8 (the modules name the files).
"""

from __future__ import annotations

import re

from ckpttools.findings import WARNING, Finding
from ckpttools.layouts.base import Contents, Part, Peek
from ckpttools.layouts.deepspeed.book import Book, with_masters
from ckpttools.layouts.deepspeed.modules import (
    missing_weights,
    open_layers,
    read_experts,
    read_layers,
    read_modules,
    share_tied,
    tied_layers,
)
from ckpttools.layouts.deepspeed.names import Names, is_rank_file, parse_names
from ckpttools.layouts.deepspeed.orders import add_orders
from ckpttools.layouts.deepspeed.partitions import read_partitions
from ckpttools.layouts.deepspeed.positions import read_without_zero
from ckpttools.layouts.deepspeed.ranks import ModelFile, OptimizerFile, Ranks, bf16_of, find_ranks, open_models
from ckpttools.layouts.deepspeed.settings import (
    check_steps,
    client_trees,
    read_client_state,
    read_optimizer_settings,
)
from ckpttools.layouts.deepspeed.stage3 import read_stage3
from ckpttools.layouts.deepspeed.states import Files, items, table
from ckpttools.layouts.deepspeed.tensor_parallel import read_rules
from ckpttools.layouts.deepspeed.universal import read_universal
from ckpttools.layouts.families import MODEL, OPTIMIZER
from ckpttools.model import FileEntry, Mesh
from ckpttools.storage.source import Listing, Source

_EXPORTED = re.compile(r"(pytorch_|adapter_)?model.*\.(safetensors|bin)")
_TRACKERS = ("latest", "latest_universal")


class DeepSpeed:
    """What `DeepSpeedEngine.save_checkpoint` and `ds_to_universal` write."""

    name = "deepspeed"
    looks_for = "`mp_rank_*_model_states.pt`, `*zero_pp_rank_*_optim_states.pt`, `layer_*-model_states.pt`, or `zero/`"

    def sniff(self, listing: Listing, peek: Peek) -> list[Part]:
        """One part: the files of a tag. In a directory around one, such as HF Trainer's, `latest` says which tag is meant.

        Where the directory has weights of its own beside the tag, as HF Trainer exports them, those are the model, and the part
        is what training resumes with.
        """
        regular = [f.path for f in listing if f.is_regular]
        tags = {path.rpartition("/")[0] for path in regular if path.count("/") < 2 and is_rank_file(path.rpartition("/")[2])}
        if "" in tags:
            return [_part(regular, "")]
        if len(tags) > 1:
            stated = {_tag(peek(name)) for name in _TRACKERS if name in listing and listing.files[name].is_regular}
            tags &= stated
        family = OPTIMIZER if any(_EXPORTED.fullmatch(path) for path in regular) else MODEL
        return [_part(regular, tags.pop(), family)] if len(tags) == 1 else []

    def read(self, source: Source, listing: Listing, part: Part) -> Contents:
        """The tensors of all ranks put together. Raises StorageError."""
        files = Files(source, listing)
        names = parse_names(part.files, part.directory)
        if names.doubled:
            probe = Files(source, listing)
            names = parse_names(part.files, part.directory, is_bf16=bf16_of(open_models(probe, names).values()))
        ranks = find_ranks(files, names)
        book = _open_book(files, ranks)
        _read_tensors(book, files, names, ranks)
        extra = read_client_state(book, files, ranks)
        check_steps(files, ranks)
        tensors = (*with_masters(book.entries(), book.shared, book.buffers), *extra)
        data = set(names.files)
        passed_over = MODEL if part.family != MODEL else ""
        return Contents(
            tensors=tuple(t for t in tensors if t.family != passed_over),
            objects=tuple(o for o in book.objects.values() if o.family != passed_over),
            files=tuple(FileEntry(p, listing.length_bytes(p), "data" if p in data else "companion") for p in part.files),
            findings=tuple(dict.fromkeys(files.findings)),
            mesh=_mesh(ranks),
            step=ranks.first.step if ranks.first else None,
            written_by=_written_by(ranks),
            checksums=tuple(files.checksums),
            trees=client_trees(ranks),
            families_are_told=True,
        )


LAYOUT = DeepSpeed()


def _part(paths: list[str], directory: str, family: str = MODEL) -> Part:
    prefix = f"{directory}/" if directory else ""
    names = parse_names(paths, directory)
    known = set(names.files)
    return Part(LAYOUT.name, family, tuple(p for p in paths if p.startswith(prefix) and p in known), directory=directory)


def _tag(data: bytes) -> str:
    return data.decode("utf-8", "replace").strip().rstrip("/").rpartition("/")[2]


def _open_book(files: Files, ranks: Ranks) -> Book:
    """An empty book that knows the tied names and the rules of tensor parallelism."""
    info, where = None, ""
    tops = [(m.top, m.path) for m in ranks.models.values()] + [(o.top, o.path) for o in ranks.optimizers.values()]
    for top, path in tops:
        if info is None and table(top.get("universal_checkpoint_info")):
            info, where = top["universal_checkpoint_info"], path
    book = Book(ranks.tp, read_rules(info, where, files.findings), files.findings)
    distinct: dict[int, ModelFile] = {}
    for model in ranks.models.values():
        distinct.setdefault(id(model.shared), model)
    for model in distinct.values():
        ties = _ties(files, ranks, model)
        book.shared |= ties or {}
        book.has_all_ties &= ties is not None and "shared_params" in model.top
    return book


def _ties(files: Files, ranks: Ranks, model: ModelFile) -> dict[str, str] | None:
    """The ties that a model file states; None where they cannot be.

    Releases before 0.9.2 took all parameters of ZeRO 3 for shared with the first one, since what is partitioned has no address:
    a name that has values of its own beside a table of ties says that the table is wrong.
    """
    own = {name for group in model.shapes or [] for name in group} | set(model.frozen_shapes)
    ties = {alias: kept for alias, kept in model.shared.items() if alias != kept}
    wrong = [alias for alias in ties if alias in own]
    if wrong and ranks.stage == 3:
        expected = "`shared_params` with the further names of parameters that are kept once"
        found = f"{len(wrong)} names of parameters that are kept by themselves, such as `{wrong[0]}`: none of it is believed"
        remedy = "none needed for the weights; give tied ones their further names, which are not known here"
        files.findings.append(Finding("container-inconsistent", model.path, expected, found, remedy, WARNING))
        return None
    return {alias: kept for alias, kept in ties.items() if alias not in own}


def _read_tensors(book: Book, files: Files, names: Names, ranks: Ranks) -> None:
    """Weights and optimizer state, stage after stage of a pipeline: the first that holds a parameter counts."""
    if ranks.stage == 0 and not names.is_universal:
        read_without_zero(book, files, names, ranks)
        settings = book.objects.get(("optimizer", "param_groups"))
        add_orders(book, ranks, len(items(settings.record)) if settings else 0)
        return
    read_modules(book, files, ranks)
    if names.layers:
        opened = open_layers(files, names)
        read_layers(book, files, names, ranks, opened, tied_layers(opened, ranks.trained))
    if names.experts:
        read_experts(book, files, names, ranks)
    ranks.name_groups(book.shape)
    ranks.order_groups()
    for pp in range(ranks.pp):
        for tp in range(ranks.tp):
            mp = pp * ranks.tp + tp
            model, optimizers = ranks.model_of(mp), ranks.optimizers_of(mp)
            if model is None or names.is_universal:
                continue
            if ranks.stage == 3:
                models = {d: m for (d, other), m in sorted(ranks.models.items()) if other == mp}
                read_stage3(book, files, models, optimizers, ranks.fused, tp=tp, dp=ranks.dp)
            else:
                read_partitions(book, files, model, optimizers, ranks.fused, tp=tp, dp=ranks.dp)
        book.settle()
    if names.is_universal:
        file = files.open(names.settings) if names.settings else None
        settings_file = OptimizerFile(names.settings, 0, 0, file, table(file.torch.value)) if file else None
        read_universal(book, files, names, ranks, settings_file)
        top = settings_file.top if settings_file else {}
    else:
        top = next((o.top for o in ranks.optimizers.values()), {})
    read_optimizer_settings(book, top)
    settings = book.objects.get(("optimizer", "param_groups"))
    stated = items(settings.record) if settings else items(top.get("single_partition_of_fp32_groups"))
    add_orders(book, ranks, len(stated))
    share_tied(book, ranks)
    if ranks.stage < 3 and not names.is_universal:
        files.findings += missing_weights(book, names)


def _mesh(ranks: Ranks) -> Mesh:
    axes = [("pp", ranks.pp), ("dp", ranks.dp), ("tp", ranks.tp)]
    return Mesh(tuple((name, size) for name, size in axes if size > 1 or name == "dp"))


def _written_by(ranks: Ranks) -> str:
    version = ranks.first.top.get("ds_version") if ranks.first else None
    return f"DeepSpeed {version}" if isinstance(version, str) else "DeepSpeed"
