"""Holds the sizes that the arguments state against each other and against the tensors. Numbers in every finding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpttools.findings import Finding
from ckpttools.layouts.megatron_legacy.arguments import Arguments
from ckpttools.layouts.megatron_legacy.names import Parallel
from ckpttools.layouts.megatron_legacy.rules import EMBEDDING
from ckpttools.model import TensorEntry

_CODE = "arguments-mismatch"


def check_sizes(arguments: Arguments, mesh: Parallel, tensors: Sequence[TensorEntry]) -> Iterator[Finding]:
    """What the mesh does not divide, and the rows of the vocabulary."""
    yield from _undivided(arguments, mesh)
    embedding = next((t for t in tensors if t.name.endswith(EMBEDDING)), None)
    if embedding is not None and embedding.spec.shape:
        yield from _vocabulary(arguments, mesh, embedding)


def _undivided(arguments: Arguments, mesh: Parallel) -> Iterator[Finding]:
    """Counts that must be multiples of the ranks that share them, and a mesh that no files could be of."""
    if arguments.tp is not None and arguments.tp != mesh.tp:
        yield Finding(_CODE, "args.tensor_model_parallel_size", "a mesh that there are files of", str(arguments.tp))
    shared = (
        ("num_attention_heads", mesh.tp, "tensor-parallel"),
        ("ffn_hidden_size", mesh.tp, "tensor-parallel"),
        ("padded_vocab_size", mesh.tp, "tensor-parallel"),
        ("num_experts", mesh.ep, "expert-parallel"),
    )
    for name, ranks, kind in shared:
        number = arguments.number(name)
        if number is not None and number % ranks:
            yield Finding(_CODE, f"args.{name}", f"a multiple of {ranks} {kind} ranks", str(number))
    groups = arguments.number("num_query_groups")
    if groups is not None and groups % mesh.tp and mesh.tp % groups and arguments.flag("group_query_attention"):
        yield Finding(_CODE, "args.num_query_groups", f"a multiple or a divisor of {mesh.tp} tensor-parallel ranks", str(groups))


def _vocabulary(arguments: Arguments, mesh: Parallel, embedding: TensorEntry) -> Iterator[Finding]:
    """The rows of the embedding are the padded vocabulary; how many of them are tokens, only the arguments can tell."""
    rows = embedding.spec.shape[0]
    padded, true = arguments.number("padded_vocab_size"), arguments.number("vocab_size")
    hidden = arguments.number("hidden_size")
    if hidden is not None and embedding.spec.shape[1:] not in ((), (hidden,)):
        yield Finding(_CODE, embedding.name, f"rows of {hidden}, as args.hidden_size states", f"{list(embedding.spec.shape)}")
    if padded is not None and padded != rows:
        yield Finding(
            _CODE, embedding.name, f"{padded} rows, as args.padded_vocab_size states", f"{rows} rows on {mesh.tp} ranks"
        )
    if true is not None and true > rows:
        yield Finding(_CODE, embedding.name, f"at least {true} rows, as args.vocab_size states", f"{rows} rows")
    if true is None:
        divisor = arguments.number("make_vocab_size_divisible_by")
        multiple = f", a multiple of {divisor} x {mesh.tp}" if divisor else ""
        yield Finding("vocabulary-unknown", embedding.name, "args.vocab_size", f"{rows} rows with the padding{multiple}")
