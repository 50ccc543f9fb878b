"""What `--names` says of the rows that pad a vocabulary: which are cut off, or that nobody knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ckpttools.layouts import open_snapshot
from ckpttools.pickles.views import attributes
from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]
SOURCE = FIXTURES / "megatron" / "tdist_tp2_model_only" / "ckpt"


def test_a_vocabulary_of_unknown_size_keeps_its_rows_and_says_so(ckpttools: Run, tmp_path: Path) -> None:
    document = ckpttools("consolidate", SOURCE, tmp_path / "out", "--names", "hf", "--weights-only", "--json").document
    kept = [note for note in document["notes"] if note.startswith("kept: all 96 rows of embedding.word_embeddings.weight")]
    assert len(kept) == 1
    assert "--setting vocab_size=N" in kept[0]


def test_rows_beyond_a_vocabulary_of_known_size_are_cut_off(ckpttools: Run, tmp_path: Path) -> None:
    arguments = ["--names", "hf", "--weights-only", "--setting", "vocab_size=90", "--json"]
    document = ckpttools("consolidate", SOURCE, tmp_path / "out", *arguments).document
    assert not [note for note in document["notes"] if note.startswith("kept:")]
    assert [note for note in document["notes"] if "rows [90, 96) of embedding.word_embeddings.weight" in note]
    shapes = {t["name"]: t["shape"] for t in ckpttools("hash", tmp_path / "out", "--json").document["tensors"]}
    assert shapes["model.embed_tokens.weight"][0] == shapes["lm_head.weight"][0] == 90


def write_model(directory: Path, config: dict[str, object]) -> Path:
    """One layer of a Llama, without values."""
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (50, 8), "lm_head.weight": (50, 8), "model.norm.weight": (8,)}
    shapes |= {f"{layer}self_attn.{n}_proj.weight": (rows, 8) for n, rows in (("q", 8), ("k", 4), ("v", 4), ("o", 8))}
    shapes |= {f"{layer}mlp.gate_proj.weight": (12, 8), f"{layer}mlp.up_proj.weight": (12, 8)}
    shapes |= {f"{layer}mlp.down_proj.weight": (8, 12), f"{layer}input_layernorm.weight": (8,)}
    shapes |= {f"{layer}post_attention_layernorm.weight": (8,)}
    directory.mkdir()
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


NUMBERS = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8, "num_hidden_layers": 1}


def test_megatrons_arguments_state_what_the_config_and_the_tensors_do(ckpttools: Run, tmp_path: Path) -> None:
    rope = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0}
    stated = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 48, "rope_parameters": rope}
    source = write_model(tmp_path / "hf", NUMBERS | stated)
    answer = ckpttools("reshard", source, tmp_path / "out", "--to", "megatron-dist", "--mesh", "tp=2", "--names", "megatron")
    assert answer.exit_code == 0, answer.stderr
    (record,) = (o.record for o in open_snapshot(str(tmp_path / "out")).checkpoint.objects if o.name == "common.args")
    assert attributes(record) == {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 48,
        "group_query_attention": True,
        "num_query_groups": 1,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "add_position_embedding": False,
        "rotary_base": 500000,
        "rotary_percent": 1.0,
        "use_rope_scaling": True,
        "rope_scaling_factor": 8.0,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "untie_embeddings_and_output_weights": True,
        "padded_vocab_size": 50,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }


def test_without_a_config_of_transformers_no_arguments_are_made_up(ckpttools: Run, tmp_path: Path) -> None:
    source = write_model(tmp_path / "hf", NUMBERS)
    arguments = ("--to", "megatron-dist", "--mesh", "tp=2", "--names", "megatron", "--json")
    document = ckpttools("reshard", source, tmp_path / "out", *arguments).document
    assert [note for note in document["notes"] if note.startswith("args were not written: no config.json states")]
    assert not [o for o in open_snapshot(str(tmp_path / "out")).checkpoint.objects if o.name == "common.args"]
