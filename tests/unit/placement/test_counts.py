"""Counts from the configs of each family, and what is told of a bad one."""

from __future__ import annotations

import pytest

from ckpttools.errors import UsageError
from ckpttools.placement.counts import Counts, counts_of


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 99},
            Counts(32, 8, 128, 32, None, 99),
        ),
        ({"num_attention_heads": 16, "head_dim": 256, "hidden_size": 2048}, Counts(16, 16, 256)),
        ({"n_head": 12, "n_layer": 6, "n_embd": 768}, Counts(12, 12, 64, 6)),
        ({"n_head": 32, "n_layer": 30, "hidden_size": 4096}, Counts(32, 32, 128, 30)),
        ({"num_heads": 8, "d_kv": 64, "d_model": 512, "num_layers": 6}, Counts(8, 8, 64, 6)),
        ({"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "n_layers": 32, "vocab_size": -1}, Counts(32, 8, 128, 32)),
        ({"dim": 4096, "n_heads": 32, "n_layers": 32}, Counts(32, 32, 128, 32)),
        ({"num_attention_heads": 8, "num_key_value_heads": None, "num_local_experts": 4}, Counts(8, 8, None, None, 4)),
        ({"num_attention_heads": 8, "num_query_groups": 1, "group_query_attention": False}, Counts(8, 8)),
        ({"n_head": 8, "multi_query": True}, Counts(8, 1)),
        ({"model_type": "gpt_bigcode", "n_head": 8}, Counts(8, 1)),
        ({"model_type": "gpt_bigcode", "n_head": 8, "multi_query": False}, Counts(8, 8)),
        ({"num_attention_heads": 8, "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": False}, Counts(8, 1)),
        ({"num_attention_heads": 8, "num_kv_heads": 8, "multi_query": False, "new_decoder_architecture": False}, Counts(8, 8)),
        ({"num_attention_heads": 8, "num_kv_heads": 2, "multi_query": True, "new_decoder_architecture": True}, Counts(8, 2)),
        ({"n_head": 8, "n_head_kv": 2}, Counts(8, 2)),
        ({"num_attention_heads": 8, "multi_query_attention": True, "multi_query_group_num": 2}, Counts(8, 2)),
        ({"num_attention_heads": 8, "multi_query_attention": False, "multi_query_group_num": 1}, Counts(8, 8)),
        ({"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}, "vision_config": {"depth": 3}}, Counts(8, 2)),
        ({"n_routed_experts": 64}, Counts(experts=64)),
        ({}, Counts()),
    ],
)
def test_configs_of_every_family_are_read(config: dict[str, object], expected: Counts) -> None:
    assert counts_of(config, "config.json") == expected


@pytest.mark.parametrize("value", [0, -3, "8", True, 1.5, [1, 2], {}, 1 << 40])
def test_a_count_that_is_none_is_told(value: object) -> None:
    with pytest.raises(UsageError, match="`num_attention_heads` is no count"):
        counts_of({"num_attention_heads": value}, "config.json")


def test_counts_are_listed_for_people() -> None:
    assert str(Counts(heads=8, kv_heads=2)) == "heads=8, kv_heads=2"
