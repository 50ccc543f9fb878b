"""What `config.json` has to say for transformers to build a model of tensors under its names. Pure.

Most of it can be read off the tensors' shapes; what cannot (heads, the base of rotary positions, epsilons) comes from the
settings of the training run.

Source: huggingface/transformers, configuration_{llama,mistral,qwen2,qwen3,stablelm,mixtral,gpt2}.py, v5.24.
Source: NVIDIA/Megatron-LM, megatron/training/arguments.py; meta-llama/llama, params.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttools.model import TensorSpec

_HEADS = ("num_attention_heads", "n_heads", "n_head", "nheads")
_GROUPS = ("num_query_groups", "n_kv_heads", "num_key_value_heads", "kvheads")
_EPSILON = ("norm_epsilon", "layernorm_epsilon", "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
_BASE = ("rotary_base", "rope_theta")
_LENGTH = ("max_position_embeddings", "max_seq_len", "max_expected_seq_len", "seq_length")
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.")


@dataclass(frozen=True)
class HfConfig:
    """A config, as far as it could be made."""

    values: Mapping[str, object] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Names of settings that nothing states."""


def config_of(tensors: Mapping[str, TensorSpec], settings: Mapping[str, object]) -> HfConfig:
    """The config of a model with these tensors."""
    found = _Found(tensors, settings)
    return _gpt2(found) if "transformer.wte.weight" in tensors else _llama(found)


@dataclass
class _Found:
    """Looks settings up, and keeps what it does not find."""

    tensors: Mapping[str, TensorSpec]
    settings: Mapping[str, object]
    missing: list[str] = field(default_factory=list)

    def number(self, names: tuple[str, ...], kinds: tuple[type, ...] = (int,)) -> int | float:
        """The first of some settings that is a number; told as missing, by its first name, where none is."""
        nested = self.settings.get("rope_parameters")
        for name in names:
            value = self.settings.get(name, nested.get(name) if isinstance(nested, Mapping) else None)
            if type(value) in kinds and isinstance(value, (int, float)):
                return value
        self.missing.append(names[0])
        return 1

    def has(self, ending: str) -> bool:
        return any(name.endswith(ending) for name in self.tensors)

    def rows(self, name: str, dim: int = 0) -> int:
        spec = self.tensors.get(name)
        return spec.shape[dim] if spec is not None and len(spec.shape) > dim else 0

    @property
    def layers(self) -> int:
        return 1 + max((int(m[1]) for n in self.tensors if (m := _LAYER.match(n))), default=-1)

    @property
    def dtype(self) -> str:
        return next(iter(self.tensors.values())).dtype.name


def _llama(found: _Found) -> HfConfig:
    first = "model.layers.0."
    heads = int(found.number(_HEADS))
    query_rows = found.rows(f"{first}self_attn.q_proj.weight")
    head_dim = query_rows // heads if heads and query_rows % heads == 0 else 0
    values: dict[str, object] = {
        "hidden_size": found.rows("model.embed_tokens.weight", 1),
        "vocab_size": found.rows("model.embed_tokens.weight"),
        "num_hidden_layers": found.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": found.rows(f"{first}self_attn.k_proj.weight") // head_dim if head_dim else heads,
        "head_dim": head_dim,
        "max_position_embeddings": int(found.number(_LENGTH)),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in found.tensors,
        "torch_dtype": found.dtype,
        "rope_theta": float(found.number(_BASE, (int, float))),
    }
    values |= _rope_scaling(found.settings)
    epsilon = found.number(_EPSILON, (float,))
    kind = _kind(found)
    if kind == "mixtral":
        gate = f"{first}block_sparse_moe.gate.weight"
        values |= {
            "intermediate_size": found.rows(f"{first}block_sparse_moe.experts.0.w1.weight"),
            "num_local_experts": found.rows(gate),
            "num_experts_per_tok": int(found.number(("moe_router_topk", "num_experts_per_tok"))),
            "sliding_window": None,
        }
    else:
        values["intermediate_size"] = found.rows(f"{first}mlp.gate_proj.weight")
    if kind == "stablelm":
        values |= {
            "layer_norm_eps": epsilon,
            "partial_rotary_factor": float(found.settings.get("rotary_percent") or 1.0),  # type: ignore[arg-type]  # a number
            "use_qkv_bias": found.has("q_proj.bias"),
        }
    else:
        values["rms_norm_eps"] = epsilon
    if kind == "llama":
        values |= {"attention_bias": found.has("q_proj.bias"), "mlp_bias": found.has("gate_proj.bias")}
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "stablelm": "StableLm", "mixtral": "Mixtral"}
    named = {"architectures": [f"{classes[kind]}ForCausalLM"], "model_type": kind}
    return HfConfig(named | values, tuple(dict.fromkeys(found.missing)))


def _rope_scaling(settings: Mapping[str, object]) -> dict[str, object]:
    """How rotary positions are stretched: as transformers' own config says, or as Megatron's arguments do (Llama 3.1's way)."""
    for key in ("rope_parameters", "rope_scaling"):
        stated = settings.get(key)
        if isinstance(stated, Mapping) and stated.get("rope_type", stated.get("type", "default")) != "default":
            return {key: dict(stated)}
    if settings.get("use_rope_scaling") is not True:
        return {}
    scaling = {"rope_type": "llama3", "factor": settings.get("rope_scaling_factor", 8.0), "low_freq_factor": 1.0}
    return {"rope_scaling": {**scaling, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}


def _kind(found: _Found) -> str:
    """Which of transformers' models has these tensors; Mistral's are Llama's."""
    if found.has("block_sparse_moe.gate.weight"):
        return "mixtral"
    if found.has("model.norm.bias"):
        return "stablelm"
    if found.has("q_norm.weight"):
        return "qwen3"
    return "qwen2" if found.has("q_proj.bias") and not found.has("o_proj.bias") else "llama"


def _gpt2(found: _Found) -> HfConfig:
    width = found.rows("transformer.wte.weight", 1)
    inner = found.rows("transformer.h.0.mlp.c_fc.weight", 1)
    values: dict[str, object] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": found.rows("transformer.wte.weight"),
        "n_positions": found.rows("transformer.wpe.weight"),
        "n_embd": width,
        "n_layer": found.layers,
        "n_head": int(found.number(_HEADS)),
        "n_inner": None if inner == 4 * width else inner,
        "activation_function": "gelu" if found.settings.get("openai_gelu") is False else "gelu_new",
        "layer_norm_epsilon": found.number(_EPSILON, (float,)),
        "tie_word_embeddings": "lm_head.weight" not in found.tensors,
        "torch_dtype": found.dtype,
    }
    return HfConfig(values, tuple(dict.fromkeys(found.missing)))
