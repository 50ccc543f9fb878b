"""How many heads, layers and experts a model has, as its config says: what decides where fused rows may be cut.

Source: huggingface/transformers, configuration_*.py of each family; meta-llama/llama params.json; pytorch/torchtitan model
arguments; NVIDIA/Megatron-LM arguments.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ckpttools.errors import UsageError

_KEYS: Mapping[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_heads", "n_head", "num_heads", "decoder_attention_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_query_groups", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "d_kv", "kv_channels", "attention_head_dim"),
    "layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "hidden": ("hidden_size", "dim", "n_embd", "d_model"),
}
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "moe_args", "ffn_config", "model")
"""Where a config of several parts keeps what it says of the language model."""
_ONE_BY_DEFAULT = ("falcon", "gpt_bigcode")
"""Types of models whose queries share one head of keys and values unless the config says `multi_query: false`."""
_MAX = 1 << 31


@dataclass(frozen=True, slots=True)
class Counts:
    """What a config says; None where it does not."""

    heads: int | None = None
    """Attention (query) heads."""
    kv_heads: int | None = None
    """Heads that keys and values have: fewer than `heads` where queries share them."""
    head_dim: int | None = None
    """Elements of one head."""
    layers: int | None = None
    experts: int | None = None
    vocab: int | None = None
    """Rows of the embedding."""

    def of(self, units: str) -> int | None:
        """How many there are of a unit of rules (`heads`, `kv_heads`, `experts`, `vocab`)."""
        found: int | None = getattr(self, units)
        return found

    def __str__(self) -> str:
        known = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{name}={value}" for name, value in known if value is not None)


def counts_of(config: Mapping[str, object], where: str) -> Counts:
    """The counts in a `config.json`, `params.json` or the arguments of a training run. Pure.

    Heads of keys and values are as many as heads where the config does not name them, as every one of these families reads
    it; the length of a head follows from the width where it is not given.

    Args: where: what messages call it: the name of the file.
    Raises: UsageError: for a count that is no number of 1 or more.
    """
    parts = [config]
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            parts.append(nested)
    found = {name: _first(parts, keys, where) for name, keys in _KEYS.items()}
    heads, hidden = found["heads"], found.pop("hidden")
    if config.get("group_query_attention") is False or config.get("multi_query_attention") is False:
        found["kv_heads"] = heads
    elif found["kv_heads"] is None or config.get("new_decoder_architecture") is False:  # Falcon states a count that it ignores
        is_one = config.get("multi_query", config.get("model_type") in _ONE_BY_DEFAULT)
        found["kv_heads"] = 1 if is_one is True else heads
    if found["head_dim"] is None and heads and hidden and hidden % heads == 0:
        found["head_dim"] = hidden // heads
    return Counts(**found)


def _first(parts: list[Mapping[str, object]], keys: tuple[str, ...], where: str) -> int | None:
    """The first of some keys that has a value."""
    for part in parts:
        for key in keys:
            value = part.get(key)
            if value is None or (value == -1 and key != "vocab_size"):  # -1: Llama's way to say that it is not set
                continue
            if isinstance(value, list) and value and all(item == value[0] for item in value):
                value = value[0]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX:
                if key == "vocab_size" and value == -1:
                    continue
                raise UsageError(f"`{key}` is no count", where=where, expected="a number of 1 or more", found=repr(value)[:80])
            return value
    return None
