"""The table of how each tensor of a Megatron model is spread over tensor-parallel ranks: name, kind, dimension, blocks.

Pure data and one look-up. A rule reads the same way in both directions: to put the ranks' tensors together, and to cut a
whole tensor for them. `cuts` does the arithmetic.

Source: NVIDIA/Megatron-LM, megatron/core/tensor_parallel/layers.py, transformer/attention.py, transformer/mlp.py,
transformer/multi_latent_attention.py, transformer/moe/*.py, ssm/mamba_mixer.py, core_v0.16; megatron/model/transformer.py and
language_model.py, 23.08; megatron/checkpointing.py (fix_query_key_value_ordering) for checkpoint versions 0 and 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

REPLICATED, COLUMN, ROW, VOCABULARY = "replicated", "column", "row", "vocabulary"


@dataclass(frozen=True, slots=True)
class Rule:
    """What tensor parallelism does to the tensors of some name."""

    pattern: str
    """Regular expression for the end of the name, after a dot or from its start; without layer and expert numbers."""
    kind: str
    """`replicated` (every rank holds the whole), `column` (output features are cut), `row` (input features are cut),
    `vocabulary` (rows are tokens, padded)."""
    dim: int | None = None
    """The dimension that is cut; None for `replicated`."""
    fused: tuple[str, ...] = ()
    """Blocks stacked along `dim`, each cut by itself: rank r holds [gate_r; up_r] and not a run of [gate; up]."""
    blocks: str = ""
    """How the sizes of the blocks are told: `gated` (two equal ones where the layer is gated, else one), `equal`, `mamba`."""
    whole: str = ""
    """An argument that states the whole size of `dim`: a rank that holds all of it replicates (some releases do)."""
    versions: tuple[float, float] = (0, 99)
    """The checkpoint versions [low, high) for which it holds."""
    is_parameter: bool = True
    """Whether it is trained; a buffer has no optimizer state."""

    def describe(self, is_fused: bool) -> str:
        """For people: `column dim 0 [gate; up]`, the blocks where there is more than one."""
        if self.dim is None:
            return self.kind
        return f"{self.kind} dim {self.dim}" + (f" [{'; '.join(self.fused)}]" if self.fused and is_fused else "")


TABLE: tuple[Rule, ...] = (
    # state space layers: rows of several kinds in one matrix
    Rule(r"mixer\.in_proj\.(weight|bias)", COLUMN, 0, ("z", "x", "B", "C", "dt"), "mamba"),
    Rule(r"mixer\.conv1d\.(weight|bias)", COLUMN, 0, ("x", "B", "C"), "mamba"),
    Rule(r"mixer\.(A_log|D|dt_bias|norm\.weight)", COLUMN, 0),
    # whole on every rank
    Rule(r"(\w*norm|\w*layernorm\w*|ln_\w+)\.(weight|bias)", REPLICATED),
    Rule(r"layer_norm_(weight|bias)", REPLICATED),
    Rule(r"router\.(expert_bias|local_tokens_per_expert)", REPLICATED, is_parameter=False),
    Rule(r"router\.(weight|bias|layer\.weight)", REPLICATED),
    Rule(r"shared_experts\.gate_weight", REPLICATED),
    Rule(r"(pooler\.dense|lm_head\.dense|binary_head|classification_head|multichoice_head)\.(weight|bias)", REPLICATED),
    Rule(r"(position_embeddings|tokentype_embeddings|tokentypes_embeddings)\.weight", REPLICATED),
    Rule(r"(conv1\.(weight|bias)|class_token|inv_freq|logit_scale)", REPLICATED),
    Rule(r"(dense|linear_proj|dense_4h_to_h|linear_fc2|out_proj)\.bias", REPLICATED),
    # vocabulary
    Rule(r"(word_embeddings|word_embeddings_for_head|output_layer)\.weight", VOCABULARY, 0),
    Rule(r"(output_layer|lm_head(\.output_layer)?)\.bias", VOCABULARY, 0),
    # attention
    Rule(r"query_key_value\.(weight|bias)", COLUMN, 0, ("query", "key", "value"), "equal", versions=(0, 1)),
    Rule(r"key_value\.(weight|bias)", COLUMN, 0, ("key", "value"), "equal", versions=(0, 1)),
    Rule(r"(query_key_value|linear_qkv|query|key_value|linear_q|linear_kv)\.(weight|bias)", COLUMN, 0),
    Rule(r"linear_q_down_proj\.weight", COLUMN, 0, whole="q_lora_rank"),
    Rule(r"linear_kv_down_proj\.weight", COLUMN, 0, whole="kv_lora_rank+qk_pos_emb_head_dim"),
    Rule(r"(linear_q_proj|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)", COLUMN, 0),
    Rule(r"core_attention\.softmax_offset", COLUMN, 0),
    Rule(r"(dense|linear_proj|out_proj)\.weight", ROW, 1),
    # feed-forward layers and experts
    Rule(r"(dense_h_to_4h|linear_fc1)\.(weight|bias)", COLUMN, 0, ("gate", "up"), "gated"),
    Rule(r"(dense_4h_to_h|linear_fc2)\.weight", ROW, 1),
    # multi-token prediction
    Rule(r"eh_proj\.weight", COLUMN, 0),
)
"""The first rule that matches a name is its rule."""

_COMPILED = tuple((re.compile(rf"(?:.*\.)?{rule.pattern}"), rule) for rule in TABLE)

GROUPED_WEIGHT = re.compile(r"(?P<module>.*\.experts)\.(?P<which>weight[12])")
"""All local experts in one matrix: `weight1` is [hidden, experts x rows], kept as [experts, hidden, rows]; `weight2` is
[experts x columns, hidden], kept as [experts, columns, hidden]; both the transpose of what a linear layer has."""
NUMBERED_WEIGHT = re.compile(r"(?P<module>.*\.experts)\.(?P<linear>linear_fc[12])\.(?P<what>weight|bias)(?P<expert>\d+)")
"""One matrix per local expert, its number at the end of the name."""
LOCAL_EXPERT = re.compile(r"(?P<module>.*)\.local_experts\.(?P<expert>\d+)\.(?P<rest>.*)")
"""One module per local expert."""

LOCAL_NAMES = (
    (re.compile(r"input_layernorm\.(weight|bias)"), r"self_attention.linear_qkv.layer_norm_\1"),
    (re.compile(r"pre_mlp_layernorm\.(weight|bias)"), r"mlp.linear_fc1.layer_norm_\1"),
)
"""Names of the norms of a layer without Transformer Engine, and what Megatron calls them in every sharded checkpoint."""
FUSED_MODULE = "self_attention.linear_qkv.weight"
"""Only layers that have it are renamed by `LOCAL_NAMES`."""

TIED_OUTPUTS = ("output_layer.weight", "word_embeddings_for_head.weight")
"""Copies of the embedding that the last stage holds where the two are tied."""
EMBEDDING = "embedding.word_embeddings.weight"


def find_rule(name: str, version: float) -> Rule | None:
    """The rule for a name in a checkpoint of this version; None when no row matches. Pure."""
    return next((r for pattern, r in _COMPILED if r.versions[0] <= version < r.versions[1] and pattern.fullmatch(name)), None)
