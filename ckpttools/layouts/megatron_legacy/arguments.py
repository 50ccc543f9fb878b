"""The arguments of the training run, as each file holds them: sizes of the model and of the mesh.

They are a claim to hold against the tensors, not a proof: where both tell a size, the tensors decide and a difference is
a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.layouts.megatron_legacy.names import Parallel, RankPath
from ckpttools.pickles.views import attributes, mapping_items

_MAX_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Arguments:
    """What an `args` namespace holds, by name."""

    values: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, record: object) -> Arguments:
        """From the record of an argparse.Namespace (or of a dict of settings)."""
        found = attributes(record)
        if found is None:
            found = {str(key): value for key, value in mapping_items(record) or []}
        return cls(found)

    def number(self, *names: str) -> int | None:
        """The first of some arguments that is a positive number."""
        values = (self.values.get(name) for name in names)
        return next((v for v in values if type(v) is int and v > 0), None)

    def flag(self, *names: str) -> bool | None:
        """The first of some arguments that is true or false."""
        values = (self.values.get(name) for name in names)
        return next((v for v in values if isinstance(v, bool)), None)

    @property
    def tp(self) -> int | None:
        """Tensor-parallel ranks."""
        return self.number("tensor_model_parallel_size", "model_parallel_size")

    @property
    def experts(self) -> int | None:
        """Experts of a layer, over all ranks."""
        return self.number("num_experts", "num_moe_experts")

    @property
    def has_experts_in_one(self) -> bool:
        """Whether all experts of a rank are one matrix, transposed (not a matrix each, as in Transformer Engine's layers)."""
        is_plain = self.values.get("moe_use_legacy_grouped_gemm") is True or self.values.get("transformer_impl") == "local"
        return self.flag("moe_grouped_gemm") is True and is_plain

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is said to be the embedding."""
        return self.flag("untie_embeddings_and_output_weights") is False

    @property
    def is_untied(self) -> bool:
        """Whether it is said not to be."""
        return self.flag("untie_embeddings_and_output_weights") is True


def parallel(arguments: Arguments, paths: Sequence[RankPath]) -> Parallel:
    """The mesh that the arguments state; where they do not, or state one beyond all reason, that of the files. Pure."""
    three = [p.numbers for p in paths if len(p.numbers) == 3]
    two = [p.numbers for p in paths if len(p.numbers) == 2]
    experts = arguments.number("expert_model_parallel_size") or 1
    virtual = arguments.number("virtual_pipeline_model_parallel_size") or 1
    stages = arguments.number("pipeline_model_parallel_size")
    tp = arguments.tp
    if tp is None or tp * (stages or 1) * experts * virtual > _MAX_RANKS:
        tp, stages, experts, virtual = 1 + max((p.numbers[0] for p in paths), default=0), None, 1, 1
    if stages is None:  # two numbers are a stage unless there are experts on several ranks
        middle = [numbers[1] for numbers in (*three, *(two if experts == 1 else []))]
        stages = 1 + max(middle, default=0)
        experts = max(experts, 1 + max((numbers[2] for numbers in three), default=0))
    return Parallel(tp, stages, experts, virtual, min(arguments.number("expert_tensor_parallel_size") or tp, tp))


def disagreements(all_arguments: Iterable[tuple[str, Arguments]]) -> list[tuple[str, str, object, object]]:
    """(file, argument, value in the first file, value here) of sizes that must be equal in all files and are not."""
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "num_experts",
        "padded_vocab_size",
    )
    found: list[tuple[str, str, object, object]] = []
    first: Arguments | None = None
    for file, arguments in all_arguments:
        first = first or arguments
        differing = [name for name in names if arguments.number(name) != first.number(name)]
        found += [(file, name, first.values.get(name), arguments.values.get(name)) for name in differing]
    return found
