"""What tensor parallelism does to a tensor of Megatron stands in the reader's table and in the rules for writing: they agree."""

from __future__ import annotations

import pytest

from ckpttools.dtypes import parse_dtype
from ckpttools.layouts.megatron_legacy.rules import find_rule
from ckpttools.model import Mesh, TensorSpec
from ckpttools.placement.assign import place
from ckpttools.placement.counts import Counts
from ckpttools.placement.rule_files import built_in

LAYER = "decoder.layers.3."
OLD = "language_model.encoder.layers.3."
MATRICES = [
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
    f"{LAYER}self_attention.linear_qkv.weight",
    f"{LAYER}self_attention.linear_proj.weight",
    f"{LAYER}self_attention.linear_q_proj.weight",
    f"{LAYER}self_attention.linear_q_up_proj.weight",
    f"{LAYER}self_attention.linear_kv_up_proj.weight",
    f"{LAYER}cross_attention.linear_q.weight",
    f"{LAYER}cross_attention.linear_kv.weight",
    f"{LAYER}mlp.linear_fc1.weight",
    f"{LAYER}mlp.linear_fc2.weight",
    f"{LAYER}mlp.router.weight",
    f"{LAYER}mlp.shared_experts.linear_fc1.weight",
    f"{LAYER}mlp.shared_experts.linear_fc2.weight",
    f"{LAYER}mlp.shared_experts.gate_weight",
    f"{LAYER}mlp.experts.local_experts.1.linear_fc1.weight",
    f"{LAYER}mlp.experts.local_experts.1.linear_fc2.weight",
    f"{OLD}self_attention.query_key_value.weight",
    f"{OLD}self_attention.dense.weight",
    f"{OLD}inter_attention.query.weight",
    f"{OLD}inter_attention.key_value.weight",
    f"{OLD}inter_attention.dense.weight",
    f"{OLD}mlp.dense_h_to_4h.weight",
    f"{OLD}mlp.dense_4h_to_h.weight",
    "language_model.pooler.dense.weight",
    "lm_head.dense.weight",
    "mtp.layers.0.eh_proj.weight",
    "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight",
    "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
]
VECTORS = [
    "output_layer.bias",
    "lm_head.bias",
    "lm_head.layernorm.weight",
    "decoder.final_layernorm.weight",
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight",
    f"{LAYER}self_attention.linear_qkv.bias",
    f"{LAYER}self_attention.linear_proj.bias",
    f"{LAYER}self_attention.linear_q_up_proj.bias",
    f"{LAYER}self_attention.q_layernorm.weight",
    f"{LAYER}self_attention.core_attention.softmax_offset",
    f"{LAYER}cross_attention.linear_kv.bias",
    f"{LAYER}mlp.linear_fc1.bias",
    f"{LAYER}mlp.linear_fc2.bias",
    f"{LAYER}mlp.router.expert_bias",
    f"{LAYER}mlp.experts.local_experts.1.linear_fc1.bias",
    f"{LAYER}mlp.experts.local_experts.1.linear_fc2.bias",
    f"{OLD}self_attention.query_key_value.bias",
    f"{OLD}self_attention.dense.bias",
    f"{OLD}inter_attention.query.bias",
    f"{OLD}mlp.dense_h_to_4h.bias",
    f"{OLD}mlp.dense_4h_to_h.bias",
]


@pytest.mark.parametrize("rules", ["megatron", "megatron_gated"])
@pytest.mark.parametrize("name", MATRICES + VECTORS)
def test_a_tensor_is_written_along_the_dimension_that_it_is_read_along(name: str, rules: str) -> None:
    read = find_rule(name, 3.0)
    assert read is not None
    shape = (16, 16) if name in MATRICES else (16,)
    spec = TensorSpec(name, parse_dtype("bfloat16"), shape)
    anchor = TensorSpec("output_layer.weight", parse_dtype("bfloat16"), (16, 16))
    tensors = [(spec, (name,), "model"), (anchor, ("output_layer.weight",), "model")]
    found = place(tensors, Mesh.parse("tp=2"), built_in(rules), Counts(4, 4), is_even=True)
    assert found.problems == ()
    cuts = [(cut.axis, cut.dim) for cut in found.tensors[0].placement.cuts]
    assert ([] if read.dim is None else [("tp", read.dim)]) == cuts
    is_gated = read.blocks == "gated" and rules == "megatron_gated"
    assert is_gated == any(cut.sections for cut in found.tensors[0].placement.cuts)
