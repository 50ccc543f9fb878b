"""Writes the files of each model-parallel rank: the model, the optimizer by position or as flat buffers, and the arguments.

Each rank's `model` has the names that its model will ask for, with layers and experts numbered from 0; the arguments say
the new mesh. What is a rank's own (random states) has no meaning on another mesh and is not written.

Source: NVIDIA/Megatron-LM, megatron/training/checkpointing.py (save_checkpoint, get_checkpoint_name), core_v0.16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttools.containers.torch_archive import arrange_archive, nest
from ckpttools.containers.trees import persistent_ids
from ckpttools.errors import ConversionError
from ckpttools.layouts.megatron_legacy.arguments import Arguments
from ckpttools.layouts.megatron_legacy.experts import Held, columns_of, require_few_columns, together
from ckpttools.layouts.megatron_legacy.names import BUFFER_FILE, MODEL_FILES, Parallel, Place
from ckpttools.layouts.megatron_legacy.numbering import parse_layer
from ckpttools.layouts.megatron_legacy.rules import EMBEDDING
from ckpttools.layouts.megatron_legacy.spelling import ChunkNames, Speller, chunks_of
from ckpttools.layouts.megatron_legacy.write_optimizer import OptimizerWriter, Records
from ckpttools.model import ArrangedFile, Arrangement, Mesh, ObjectEntry, Path, PathKey
from ckpttools.pickles.records import Global, Object
from ckpttools.placement.held import held_by
from ckpttools.placement.local import PlacedTensor, coordinate

_AXES = ("tp", "ep", "pp")
_LISTS = ("decoder.layers", "encoder.layers", "transformer.layers")
_RANK_LOCAL = ("rng_state", "rerun_state_machine")
_FORMAT = {"ckpt_format": "torch", "use_dist_ckpt": False}
"""What the arguments say of the files."""
_STAGE_SETTINGS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
"""Arguments that describe how layers were cut into stages, and would contradict the new ones."""


def refusals(tensors: Sequence[PlacedTensor], *, objects: Sequence[ObjectEntry]) -> dict[str, str]:
    """Per name of a tensor or object: why these files have no place for it. Pure."""
    refused = {t.spec.name: why for t in tensors if (why := _why_no_tensor(t))}
    refused |= {o.name: why for o in objects if (why := _why_no_object(o))}
    refused |= {o.name: f"{o.kind}: its value was not read" for o in objects if o.record is None and o.kind != "NoneType"}
    inner = {o.name: f"{o.kind}: it holds a tensor" for o in objects if next(persistent_ids(o.record), None) is not None}
    return {**inner, **refused}


def _why_no_tensor(tensor: PlacedTensor) -> str:
    path = _shared_path(tensor.path)
    is_state = path[:2] == ("optimizer", "state") and len(path) == 4
    if tensor.family == "model" or is_state or (path[0] == "optimizer" and "grad_scaler" in path):
        return ""
    if path[0] in _RANK_LOCAL or str(path[0]).startswith(_RANK_LOCAL):
        return "a rank's own, of no meaning on another mesh"
    return "state of no parameter that the source names" if "optimizer" in str(path[0]) else "no tensor of the model"


def _why_no_object(entry: ObjectEntry) -> str:
    path = _shared_path(entry.path)
    if str(path[0]).startswith(_RANK_LOCAL):
        return "a rank's own, of no meaning on another mesh"
    if "/shard_" in entry.name:
        return "an object of its own in a sharded checkpoint"
    is_unnamed = path[0] == "optimizer" and len(path) > 1 and str(path[1]).startswith(("mp_rank_", "rank_"))
    return "state of no known parameter" if is_unnamed else ""


def _shared_path(path: Path) -> Path:
    """Keys of an entry from the top of a rank's file; sharded checkpoints have these below `common`."""
    return path[1:] if len(path) > 1 and path[0] == "common" else path


def arrange_ranks(
    tensors: Sequence[PlacedTensor],
    mesh: Mesh,
    *,
    objects: Sequence[ObjectEntry],
    sequences: Mapping[Path, str],
) -> Arrangement:
    """`mp_rank_*/model_optim_rng.pt` (and `distrib_optim.pt`) of every rank. Pure.

    Raises: ConversionError: for axes that are none of this layout's, names that are none of Megatron's, and optimizer state
        that its groups do not tell how to write.
    """
    sizes = dict(mesh.axes)
    others = [axis for axis in sizes if axis not in _AXES and sizes[axis] > 1]
    if others:
        raise ConversionError(
            f"megatron_legacy has no axis {', '.join(others)}", expected=f"some of {', '.join(_AXES)}", found=str(mesh)
        )
    model = [t for t in tensors if t.family == "model"]
    if not any(layer.layers.endswith(_LISTS) for t in model if (layer := parse_layer(t.spec.name)) is not None):
        raise ConversionError("no tensor has a Megatron name of a layer", found=", ".join(t.spec.name for t in model[:4]))
    writer = _Writer(model, tensors, mesh, objects, sequences)
    files = [file for rank in range(mesh.ranks) for file in writer.files(rank)]
    return Arrangement("megatron_legacy", tuple(files))


class _Writer:
    """Writes every rank of one mesh."""

    def __init__(
        self,
        model: Sequence[PlacedTensor],
        tensors: Sequence[PlacedTensor],
        mesh: Mesh,
        objects: Sequence[ObjectEntry],
        sequences: Mapping[Path, str],
    ) -> None:
        sizes = dict(mesh.axes)
        self._mesh = mesh
        self._turned = 0
        self._objects = [replace(o, path=_shared_path(o.path)) for o in objects]
        self._sequences = sequences
        tp = sizes.get("tp", 1)
        self._parallel = Parallel(tp, sizes.get("pp", 1), sizes.get("ep", 1), _chunk_count(model, mesh), tp)
        self._names = {t.spec.name for t in model}
        self._uneven = _uneven_stages(model, self._parallel)
        self._args = next((o.record for o in self._objects if o.path == ("args",)), None)
        self._arguments = Arguments.read(self._args)
        self._model = [_at_the_first_stage(t) for t in model] if self._arguments.is_untied else model
        self._has_copy = any(t.spec.name == EMBEDDING and self._is_at_the_last_stage(t) for t in self._model)
        _require_whole_heads(self._arguments, tp)
        self._optimizer = OptimizerWriter(tensors, self._objects, self._arguments, self._parallel)

    def _is_at_the_last_stage(self, tensor: PlacedTensor) -> bool:
        return self._parallel.pp > 1 and self._parallel.pp - 1 in dict(tensor.placement.held_at).get("pp", ())

    def files(self, rank: int) -> list[ArrangedFile]:
        """The files of one rank."""
        at = coordinate(self._mesh, rank)
        place = Place(at.get("pp", 0), at.get("ep", 0), at.get("tp", 0))
        directory = self._parallel.directory(place)
        own = {h.tensor.spec.name: h for h in held_by(self._model, self._mesh, rank)}
        held: Mapping[str, Held] = together(own) if self._arguments.has_experts_in_one else own
        is_last = self._parallel.pp > 1 and place.pp == self._parallel.pp - 1
        speller = Speller.of(self._arguments, held, is_last_of_several=is_last)
        chunks = chunks_of(list(held), speller, self._parallel.vpp)
        records = Records()
        top: dict[object, object] = {"args": self._new_args(rank)}
        top |= self._shared_objects()
        for i, chunk in enumerate(chunks):
            state = {stored: records.add(held[name]) for name, stored in chunk.names}
            state |= self._extra_states(chunk)
            top["model" if self._parallel.vpp == 1 else f"model{i}"] = _nested(state)
        found = self._optimizer.write(held, chunks, self._mesh, rank, records, is_first=place.pp == 0)
        if found.value is not None:
            top["optimizer"] = found.value
        self._turned += columns_of([*records.storages.values(), *found.buffer_storages.values()])
        require_few_columns(self._turned)
        files = [arrange_archive(f"{directory}/{MODEL_FILES[0]}", top, records.storages)]
        if found.buffers is not None:
            files.append(arrange_archive(f"{directory}/{BUFFER_FILE}", found.buffers, found.buffer_storages))
        return files

    def _new_args(self, rank: int) -> Object:
        """The arguments with the new mesh in them."""
        p = self._parallel
        changed: dict[str, object] = {
            "tensor_model_parallel_size": p.tp,
            "pipeline_model_parallel_size": p.pp,
            "virtual_pipeline_model_parallel_size": p.vpp if p.vpp > 1 else None,
            "expert_model_parallel_size": p.ep,
        }
        known = dict(self._arguments.values)
        changed |= {name: None for name in _STAGE_SETTINGS if known.get(name) is not None} | self._uneven
        changed |= {"expert_tensor_parallel_size": p.tp} if known.get("expert_tensor_parallel_size") is not None else {}
        changed |= {"untie_embeddings_and_output_weights": False} if self._has_copy else {}
        changed |= {"rank": rank} if "rank" in known else {}
        changed |= {name: value for name, value in _FORMAT.items() if name in known}
        if isinstance(self._args, Object):
            return replace(self._args, state={**known, **changed})
        return Object(Global("argparse", "Namespace"), (), state={**known, **changed})

    def _shared_objects(self) -> dict[object, object]:
        """What all ranks share: iteration, version, scheduler; not the model's extra states nor the optimizer's settings."""
        entries: dict[object, object] = {"checkpoint_version": 3.0}
        branches: dict[PathKey, dict[Path, object]] = {}
        for entry in self._objects:
            if entry.path[0] in ("args", "optimizer", *_RANK_LOCAL) or entry.name.endswith("_extra_state"):
                continue
            if len(entry.path) == 1:
                entries[entry.path[0]] = entry.record
            else:
                branches.setdefault(entry.path[0], {})[entry.path[1:]] = entry.record
        for key, below in branches.items():
            inner = {path[1:]: kind for path, kind in self._sequences.items() if path[:1] == (key,)}
            entries[key] = nest(list(below.items()), inner)
        return entries

    def _extra_states(self, chunk: ChunkNames) -> dict[str, object]:
        """States that modules keep beside their tensors, for the modules that are in a chunk."""
        modules = {name.rpartition(".")[0]: stored.rpartition(".")[0] for name, stored in chunk.names}
        found = {}
        for entry in self._objects:
            module, _, last = entry.name.rpartition(".")
            if last == "_extra_state" and module in modules and (entry.record is not None or entry.kind == "NoneType"):
                found[f"{modules[module]}.{last}"] = entry.record
        return found


def _at_the_first_stage(tensor: PlacedTensor) -> PlacedTensor:
    """The same; an embedding that is no head is the first stage's alone, though there may be no head (a classifier's body)."""
    stages = dict(tensor.placement.held_at).get("pp", ())
    if tensor.spec.name != EMBEDDING or len(stages) < 2:
        return tensor
    held_at = tuple((axis, stages[:1] if axis == "pp" else places) for axis, places in tensor.placement.held_at)
    return replace(tensor, placement=replace(tensor.placement, held_at=held_at))


def _chunk_count(model: Sequence[PlacedTensor], mesh: Mesh) -> int:
    """Runs of layers of a stage, the most of any: chunks of an interleaved pipeline are apart."""
    most = 1
    for stage in range(dict(mesh.axes).get("pp", 1)):
        numbers: dict[str, set[int]] = {}
        for tensor in model:
            layer = parse_layer(tensor.spec.name)
            stages = dict(tensor.placement.held_at).get("pp", (stage,))
            if layer is not None and stage in stages:
                numbers.setdefault(layer.layers, set()).add(layer.number)
        for found in numbers.values():
            most = max(most, sum(n - 1 not in found for n in found))
    return most


def _require_whole_heads(arguments: Arguments, tp: int) -> None:
    """Query groups go whole to ranks, or are cut into equal parts; nothing else is built."""
    groups = arguments.number("num_query_groups")
    if groups is not None and groups % tp and tp % groups and arguments.flag("group_query_attention"):
        raise ConversionError(
            f"{groups} query groups do not fit {tp} tensor-parallel ranks",
            expected=f"a multiple or a divisor of {tp}",
            found=str(groups),
        )


def _uneven_stages(model: Sequence[PlacedTensor], mesh: Parallel) -> dict[str, object]:
    """The arguments by which a model is built with stages of these lengths; none where all are equal.

    Raises: ConversionError: for lengths that no argument describes: only the first and the last stage may differ.
    """
    layers: dict[str, dict[int, set[int]]] = {}
    for tensor in model:
        layer = parse_layer(tensor.spec.name)
        if layer is not None:
            for stage in dict(tensor.placement.held_at).get("pp", (0,)):
                layers.setdefault(layer.layers, {}).setdefault(stage, set()).add(layer.number)
    for name, stages in layers.items():
        if mesh.pp == 1 or name.startswith("mtp."):
            continue
        counts = [len(stages.get(stage, ())) for stage in range(mesh.pp)]
        total = sum(counts)
        if mesh.vpp > 1 and total % (mesh.pp * mesh.vpp):
            raise ConversionError(
                f"{total} layers cannot be divided evenly among {mesh.pp} stages of {mesh.vpp} chunks",
                expected=f"a multiple of {mesh.pp * mesh.vpp}",
                found=str(total),
            )
        if len(set(counts)) == 1:
            continue
        if len(set(counts[1:-1])) > 1:
            raise ConversionError(
                f"{total} layers cannot be divided evenly among {mesh.pp} stages",
                expected="stages of one length but for the first and the last",
                found=", ".join(map(str, counts)),
                hints=["--pp-layers gives the layers of each stage"],
            )
        return {"decoder_first_pipeline_num_layers": counts[0], "decoder_last_pipeline_num_layers": counts[-1]}
    return {}


def _nested(state: Mapping[str, object]) -> dict[object, object]:
    """The dict of a chunk: flat, but for models before Megatron-core, which nest the parts of the language model."""
    if not any(name.startswith("language_model.") for name in state) and "word_embeddings_for_head.weight" not in state:
        return dict(state.items())
    found: dict[object, object] = {}
    for name, record in state.items():
        keys = _keys(name)
        inner = found
        for key in keys[:-1]:
            deeper = inner.setdefault(key, {})
            if not isinstance(deeper, dict):
                raise ConversionError(f"`{name}` lies below a tensor")
            inner = deeper
        inner[keys[-1]] = record
    return found


def _keys(name: str) -> list[str]:
    """The keys that lead to a tensor of a model before Megatron-core: the transformer's own names are one key."""
    parts = name.split(".")
    if parts[0] == "language_model" and len(parts) > 2 and parts[1] in ("encoder", "decoder", "transformer"):
        return [*parts[:2], ".".join(parts[2:])]
    return parts
