"""What Megatron's `args` say of a model that a config of transformers describes, for tensors under Megatron's names. Pure.

Megatron compares some of them with its own before it loads, and takes its own from them with `--use-checkpoint-args`. Only what
the config or the tensors state is there: nothing of training (batch sizes, sequence length, tokenizer).

Source: NVIDIA/Megatron-LM, megatron/training/checkpointing.py (check_checkpoint_args, load_args_from_checkpoint) and
tools/checkpoint/loader_mixtral_hf.py, core_v0.16; huggingface/transformers, configuration_{llama,mixtral,gpt2}.py, v5.24.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.model import TensorSpec

_NUMBERS = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "kv_channels": ("head_dim",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "num_experts": ("num_local_experts",),
    "moe_router_topk": ("num_experts_per_tok",),
    "vocab_size": ("vocab_size",),
}
"""Argument -> keys of a config that state it."""
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")


def arguments_of(config: Mapping[str, object], tensors: Mapping[str, TensorSpec]) -> dict[str, object]:
    """The arguments, as far as they are stated; none where the config is not one of transformers' language models."""
    found: dict[str, object] = {}
    for name, keys in _NUMBERS.items():
        value = next((config[key] for key in keys if type(config.get(key)) is int), None)
        found |= {name: value} if value is not None else {}
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= found.keys() or "model_type" not in config:
        return {}
    width, heads = config.get("hidden_size", config.get("n_embd")), found["num_attention_heads"]
    if "n_inner" in config and type(width) is int:
        found.setdefault("ffn_hidden_size", 4 * width)  # what GPT-2 means by null
    groups = config.get("num_key_value_heads")
    found |= {"group_query_attention": groups != heads} if type(groups) is int else {"group_query_attention": False}
    found |= {"num_query_groups": groups} if type(groups) is int and groups != heads else {}
    return found | _positions(config) | _norms(config, tensors) | _shape_of_layers(tensors)


def _positions(config: Mapping[str, object]) -> dict[str, object]:
    """Rotary positions with their base, or learned ones (GPT-2's, whose activation Megatron has an argument for)."""
    nested = config.get("rope_parameters")
    rope = nested if isinstance(nested, Mapping) else {}
    base = config.get("rope_theta", rope.get("rope_theta"))
    if "n_positions" in config:
        is_tanh = config.get("activation_function") == "gelu_new"
        return {"position_embedding_type": "learned_absolute", "add_position_embedding": True, "openai_gelu": is_tanh}
    found: dict[str, object] = {"position_embedding_type": "rope", "use_rotary_position_embeddings": True}
    found["add_position_embedding"] = False
    found |= {"rotary_base": int(base)} if isinstance(base, (int, float)) and base == int(base) else {}
    partial = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    found |= {"rotary_percent": float(partial)} if isinstance(partial, (int, float)) else {}
    stated = config.get("rope_scaling")
    scaling = stated if isinstance(stated, Mapping) else rope
    if scaling.get("rope_type", scaling.get("type")) == "llama3":
        found |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.get("factor", 8.0)}
    return found


def _norms(config: Mapping[str, object], tensors: Mapping[str, TensorSpec]) -> dict[str, object]:
    epsilon = next((config[key] for key in _EPSILONS if isinstance(config.get(key), float)), None)
    has_bias = any(name.endswith(("layernorm.bias", "layer_norm_bias")) for name in tensors)
    found: dict[str, object] = {"normalization": "LayerNorm" if has_bias else "RMSNorm"}
    return found | ({"norm_epsilon": epsilon} if epsilon is not None else {})


def _shape_of_layers(tensors: Mapping[str, TensorSpec]) -> dict[str, object]:
    """What the names and shapes of the tensors tell: gates, biases, norms of queries and keys, a head of its own, rows."""

    def has(*endings: str) -> bool:
        return any(name.endswith(endings) for name in tensors)

    found: dict[str, object] = {
        "swiglu": _is_gated(tensors),
        "add_bias_linear": has("linear_proj.bias", "linear_fc2.bias"),
        "add_qkv_bias": has("linear_qkv.bias") and not has("linear_proj.bias"),
        "qk_layernorm": has("q_layernorm.weight"),
        "untie_embeddings_and_output_weights": has("output_layer.weight"),
    }
    embedding = tensors.get("embedding.word_embeddings.weight")
    return found | ({"padded_vocab_size": embedding.shape[0]} if embedding is not None and embedding.shape else {})


def _is_gated(tensors: Mapping[str, TensorSpec]) -> bool:
    """Whether a first linear layer has twice the rows that the second has columns."""
    for name, spec in tensors.items():
        second = tensors.get(name.replace("linear_fc1.weight", "linear_fc2.weight"))
        if name.endswith("linear_fc1.weight") and second is not None and len(spec.shape) == len(second.shape) > 1:
            return spec.shape[-2] == 2 * second.shape[-1]
    return False
