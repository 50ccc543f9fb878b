"""What `reshard` can write: each target's name, what it holds, and the layout that arranges it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckpttools.layouts import dcp, llama, vllm
from ckpttools.layouts.dcp_hf import write as dcp_hf
from ckpttools.layouts.deepspeed import write as deepspeed
from ckpttools.layouts.megatron_dist import write as megatron_dist
from ckpttools.layouts.megatron_legacy import write as write_legacy
from ckpttools.layouts.per_rank import write as per_rank
from ckpttools.model import Arrangement, Mesh, ObjectEntry, Path, TensorEntry
from ckpttools.placement.assign import HeldAt
from ckpttools.placement.local import PlacedTensor, coordinate
from ckpttools.placement.rules import RuleSet


@dataclass(frozen=True, slots=True)
class Details:
    """What some targets can be told beside the mesh; the others ignore it."""

    files_per_rank: int = 1
    max_part_bytes: int | None = None
    """Of tensors in one safetensors file, where a rank's share may be divided."""
    torch_release: str | None = None
    """The release that shall load pickled DTensors; the newest known unless given."""
    device_type: str = "cpu"
    """Of the meshes of pickled DTensors, which must be equal to those of the job that loads them."""
    axis_names: Mapping[str, str] | None = None
    """Mesh axis -> what that job calls it; verl's names unless given."""
    virtual_stages: int = 1
    """Chunks of layers that each pipeline stage holds, dealt out in turn."""
    zero: int | None = None
    """The ZeRO stage of a DeepSpeed target."""


@dataclass(frozen=True)
class Request:
    """All that a layout may need to arrange files for the ranks of a mesh."""

    tensors: Sequence[PlacedTensor]
    mesh: Mesh
    objects: Sequence[ObjectEntry]
    sequences: Mapping[Path, str]
    """Path of each branch of nested values that is a `list` or a `tuple`."""
    aliases: Mapping[str, str]
    """Output name that is not written -> the output name whose tensor it is."""
    details: Details = Details()


class Deriving(Protocol):
    """Tells what of some tensors (by output name) a target need not be given."""

    def __call__(
        self, tensors: Mapping[str, TensorEntry], objects: Sequence[ObjectEntry], *, stage: int, mesh: Mesh
    ) -> deepspeed.Derived:
        """By the ZeRO stage and the ranks."""
        ...


OwnPlaces = Callable[
    [Mapping[str, TensorEntry], Sequence[ObjectEntry], Mesh, Sequence[int]], tuple[RuleSet | None, Mapping[str, HeldAt]]
]
"""Tells of some tensors (by output name) by which rules they are cut and where those are that not every rank has, as far as the
checkpoint itself says it, for a mesh and the layers of each stage that a user gave."""


@dataclass(frozen=True)
class Target:
    """One way to lay a checkpoint out for the ranks of a mesh."""

    name: str
    """As `--to` has it."""
    summary: str
    arrange: Callable[[Request], Arrangement]
    refusals: Callable[[Request], Mapping[str, str]]
    """Name of a tensor or object -> why the files cannot hold it."""
    holds_objects: bool = True
    """Whether it has a place for what is no tensor."""
    holds_state: bool = True
    """Whether it has a place for optimizer state and other families beside the model's tensors."""
    needs_even: bool = False
    """Whether every rank's share must have the same shape, as whoever loads plain tensors expects."""
    copies_heads: bool = False
    """Whether ranks hold copies of key/value heads where these are fewer than ranks, as those who load plain shares expect."""
    rules: Callable[[Mapping[str, Sequence[int]]], str] = lambda shapes: ""
    """Name of the built-in set of rules by which the target's own loader has tensors of such shapes cut; empty where the names
    tell."""
    shares_storage: bool = False
    """Whether tied tensors stay one stored tensor under several names; otherwise each name is written."""
    spelling: str = ""
    """How it spells Megatron's names: `stacked` or `single` (see `spelling`); empty where it has none of its own."""
    derives: Deriving | None = None
    """What it need not be given, because it follows from the rest."""
    world: Callable[[Mesh], Mesh] = lambda mesh: mesh
    """A mesh as a user gives it -> one whose sizes multiply to the number of ranks."""
    stated: Callable[[Mesh, Mesh], Mesh] = lambda world, asked: world
    """Such a mesh, and the one that a user gave -> the former in the terms of the latter."""
    rank_at: Callable[[Mesh, int], Mapping[str, int]] = coordinate
    """A mesh as a user gives it and a rank -> its coordinates along those axes."""
    own_places: OwnPlaces = lambda tensors, objects, mesh, layers: (None, {})
    """What the checkpoint itself tells of placement, where the target asks it."""
    holds_whole_items: bool = False
    """Whether an object that is a torch file of its own in the source goes over byte for byte."""
    parts_layers: bool = False
    """Whether each layer and expert is a tensor of its own, so that stacks of a source are taken apart."""
    has_virtual_stages: bool = False
    """Whether a pipeline stage may hold several chunks of layers."""
    keeps_arguments: bool = False
    """Whether its loader looks up the model in the arguments of the training run: they go along with the weights alone."""


def _asked(function: Callable[..., Arrangement], request: Request, **options: object) -> Arrangement:
    """What a layout's `arrange_ranks` makes of a request, with the options that it has beside the usual ones."""
    return function(request.tensors, request.mesh, objects=request.objects, sequences=request.sequences, **options)


def _dcp(request: Request) -> Arrangement:
    return _asked(dcp.arrange_ranks, request, files_per_rank=request.details.files_per_rank)


def _safetensors(request: Request) -> Arrangement:
    size = request.details.max_part_bytes
    return _asked(dcp_hf.arrange_ranks, request, aliases=request.aliases, max_file_bytes=size)


def _vllm(request: Request) -> Arrangement:
    size = request.details.max_part_bytes
    return _asked(vllm.arrange_ranks, request, aliases=request.aliases, max_part_bytes=size)


def _llama_rules(shapes: Mapping[str, Sequence[int]]) -> str:
    """Llama 1 and 2, which have 32,000 tokens, cut the embedding along its columns; Llama 3, with 128,256, along its rows."""
    tokens = [shape[0] for name, shape in shapes.items() if name.endswith("tok_embeddings.weight") and len(shape) == 2]
    return "llama_meta1" if tokens and max(tokens) < 1 << 16 else ""


def _llama(request: Request) -> Arrangement:
    return _asked(llama.arrange_ranks, request, aliases=request.aliases)


def _megatron_dist(request: Request) -> Arrangement:
    return _asked(megatron_dist.arrange_ranks, request, files_per_rank=request.details.files_per_rank)


def _torch(request: Request, *, has_dtensors: bool) -> Arrangement:
    details = request.details
    return _asked(
        per_rank.arrange_ranks,
        request,
        aliases=request.aliases,
        has_dtensors=has_dtensors,
        torch_release=details.torch_release or "",
        device_type=details.device_type,
        axis_names=details.axis_names,
    )


def _torch_refusals(request: Request, *, has_dtensors: bool) -> dict[str, str]:
    return per_rank.refusals(
        request.tensors,
        request.mesh,
        objects=request.objects,
        has_dtensors=has_dtensors,
        torch_release=request.details.torch_release or "",
    )


def _deepspeed(request: Request) -> Arrangement:
    return deepspeed.arrange_ranks(_for_deepspeed(request))


def _deepspeed_universal(request: Request) -> Arrangement:
    return deepspeed.arrange_universal(_for_deepspeed(request))


def _for_deepspeed(request: Request) -> deepspeed.Entries:
    return deepspeed.sort_entries(
        request.tensors,
        request.objects,
        aliases=request.aliases,
        sequences=request.sequences,
        grid=deepspeed.Grid.of(request.mesh),
        stage=request.details.zero or 0,
    )


TARGETS = (
    Target(
        "dcp",
        "torch.distributed.checkpoint: `.metadata` and `__<rank>_<n>.distcp`",
        _dcp,
        lambda request: dcp.refusals(request.objects),
        holds_whole_items=True,
    ),
    Target(
        "safetensors",
        "what DCP's Hugging Face writer leaves per rank: `shard-<rank + 1>-model-<i>-of-<n>.safetensors`",
        _safetensors,
        lambda request: dcp_hf.refusals(request.tensors, request.mesh, objects=request.objects),
        holds_objects=False,
        holds_state=False,
    ),
    Target(
        "dtensor",
        "a torch file of DTensors per rank, as verl and FSDP2 have it: `model_world_size_<W>_rank_<R>.pt`",
        partial(_torch, has_dtensors=True),
        partial(_torch_refusals, has_dtensors=True),
        shares_storage=True,
    ),
    Target(
        "torch",
        "the same files with plain tensors, each rank's own share",
        partial(_torch, has_dtensors=False),
        partial(_torch_refusals, has_dtensors=False),
        needs_even=True,
        copies_heads=True,
        shares_storage=True,
    ),
    Target(
        "vllm",
        "vLLM's sharded state: `model-rank-<R>-part-<P>.safetensors`",
        _vllm,
        lambda request: vllm.refusals(request.tensors, request.mesh, objects=request.objects),
        holds_objects=False,
        holds_state=False,
        needs_even=True,
        copies_heads=True,
        shares_storage=True,
    ),
    Target(
        "llama",
        "Meta's own files of Llama: `consolidated.<NN>.pth`",
        _llama,
        lambda request: llama.refusals(request.tensors, request.mesh, objects=request.objects),
        holds_state=False,
        needs_even=True,
        copies_heads=True,
        rules=_llama_rules,
        shares_storage=True,
    ),
    Target(
        "deepspeed",
        "what DeepSpeed's engine resumes from, with ZeRO stage 0, 1, 2 or 3",
        _deepspeed,
        lambda request: {},
        needs_even=True,
        derives=deepspeed.find_derived,
        world=deepspeed.world_mesh,
        stated=deepspeed.stated_mesh,
        rank_at=deepspeed.rank_at,
        own_places=deepspeed.own_places,
    ),
    Target(
        "deepspeed-universal",
        "DeepSpeed's universal checkpoint, for engines of ZeRO stage 1 and 2, or of 3",
        _deepspeed_universal,
        lambda request: {},
        needs_even=True,
        derives=partial(deepspeed.find_derived, is_universal=True),
        world=deepspeed.world_mesh,
        stated=deepspeed.stated_mesh,
        rank_at=deepspeed.rank_at,
        own_places=deepspeed.own_places,
    ),
    Target(
        "megatron-dist",
        "Megatron-core's torch_dist: DCP's files, `common.pt` and `metadata.json`",
        _megatron_dist,
        lambda request: megatron_dist.refusals(request.tensors) | dcp.refusals(request.objects),
        holds_whole_items=True,
        spelling="stacked",
        keeps_arguments=True,
    ),
    Target(
        "megatron-legacy",
        "Megatron-LM's `mp_rank_*/model_optim_rng.pt`, with `distrib_optim.pt` for a distributed optimizer",
        lambda r: write_legacy.arrange_ranks(r.tensors, r.mesh, objects=r.objects, sequences=r.sequences),
        lambda request: write_legacy.refusals(request.tensors, objects=request.objects),
        needs_even=True,
        parts_layers=True,
        has_virtual_stages=True,
        spelling="single",
        keeps_arguments=True,
    ),
)
"""In the order in which help lists them."""

BY_NAME = {target.name: target for target in TARGETS}
