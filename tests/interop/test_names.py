"""Models of transformers go to Megatron's names and back: the same bytes, and the same logits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpttools.layouts import open_snapshot
from ckpttools.model import Mesh
from ckpttools.operations.convert import consolidate
from ckpttools.operations.naming import Naming
from ckpttools.operations.reshard import reshard
from ckpttools.operations.sealing import hash_tensors
from tests.fixture_cases import Case

pytest.importorskip("transformers", reason="needs transformers, which loads what we write")

pytestmark = pytest.mark.interop

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 32}


def built(kind: str) -> torch.nn.Module:
    import transformers as hf

    torch.manual_seed(7)
    grouped = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
    makers = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped, rope_theta=5e5)),
        "llama_tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped, tie_word_embeddings=True)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**grouped)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**grouped, num_local_experts=4)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=4)),
    }
    model = makers[kind]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "mistral", "qwen2", "mixtral", "gpt2"])
def test_to_megatron_and_back_gives_the_same_bytes_and_logits(kind: str, tmp_path: Path) -> None:
    import transformers as hf

    model = built(kind)
    model.save_pretrained(tmp_path / "hf")
    mesh = "tp=2,ep=2,pp=2" if kind == "mixtral" else "tp=2,pp=2"
    config = str(tmp_path / "hf" / "config.json")
    reshard(
        str(tmp_path / "hf"),
        str(tmp_path / "megatron"),
        target="megatron-dist",
        mesh=Mesh.parse(mesh),
        naming=Naming(("megatron",), config),
    )
    names = {t.name for t in open_snapshot(str(tmp_path / "megatron")).checkpoint}
    assert "decoder.layers.self_attention.linear_qkv.weight" in names
    (tmp_path / "megatron" / "config.json").unlink(missing_ok=True)
    consolidate(str(tmp_path / "megatron"), str(tmp_path / "back"), naming=Naming(("hf",), config))
    assert hash_tensors(str(tmp_path / "hf")).fingerprint == hash_tensors(str(tmp_path / "back")).fingerprint
    tokens = torch.arange(24).reshape(2, 12) % 64
    returned = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, returned(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["megatron-dist", "megatron-legacy"])
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "mistral", "qwen2", "mixtral", "gpt2"])
def test_arguments_of_the_config_go_along_and_lead_back_to_it(kind: str, target: str, tmp_path: Path) -> None:
    """Megatron's files state the model; from them alone, without the config, comes a model with the same logits."""
    import transformers as hf

    model = built(kind)
    model.save_pretrained(tmp_path / "hf")
    reshard(str(tmp_path / "hf"), str(tmp_path / "m"), target=target, mesh=Mesh.parse("tp=2,pp=2"), naming=Naming(("megatron",)))
    for config in tmp_path.glob("m/*config.json"):
        config.unlink()
    first = next(tmp_path.glob("m/mp_rank_00*/*.pt"), tmp_path / "m" / "common.pt")
    stored = torch.load(first, weights_only=False)
    args = stored["args"]
    assert (4, 32, 4, 64, 64, 2, 2, 0, 3.0) == (
        *(args.num_layers, args.hidden_size, args.num_attention_heads, args.vocab_size, args.padded_vocab_size),
        *(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, stored["iteration"], stored["checkpoint_version"]),
    )
    assert (kind in ("llama_tied", "gpt2")) is not args.untie_embeddings_and_output_weights
    assert (kind != "gpt2") is args.swiglu
    back = consolidate(str(tmp_path / "m"), str(tmp_path / "back"), naming=Naming(("hf",)))
    assert [] == [note for note in back.notes if "not written" in note]
    returned = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = torch.arange(24).reshape(2, 12) % 64
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, returned(tokens).logits)


def test_query_rows_of_megatron_are_the_groups_of_the_fused_tensor(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path / "hf")
    naming = Naming(("megatron",), str(tmp_path / "hf" / "config.json"))
    reshard(str(tmp_path / "hf"), str(tmp_path / "m"), target="megatron-dist", mesh=Mesh.parse("tp=2"), naming=naming)
    consolidate(str(tmp_path / "m"), str(tmp_path / "m.safetensors"))
    fused = load_file(tmp_path / "m.safetensors")["decoder.layers.self_attention.linear_qkv.weight"]
    state = model.state_dict()
    for layer in range(4):
        q, k, v = (state[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
        groups = [torch.cat([q[16 * g : 16 * g + 16], k[8 * g : 8 * g + 8], v[8 * g : 8 * g + 8]]) for g in range(2)]
        assert torch.equal(torch.cat(groups), fused[layer])


def test_meta_rows_are_those_of_the_rotary_permutation_of_transformers(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path / "hf")
    naming = Naming(("meta",), str(tmp_path / "hf" / "config.json"))
    consolidate(str(tmp_path / "hf"), str(tmp_path / "consolidated.00.pth"), naming=naming)
    ours, state = torch.load(tmp_path / "consolidated.00.pth", weights_only=True), model.state_dict()
    for theirs, name, heads in (("wq", "q_proj", 4), ("wk", "k_proj", 2)):
        stored = ours[f"layers.1.attention.{theirs}.weight"]
        rows, width = stored.shape
        # what transformers' own script does to Meta's rows
        permuted = stored.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
        assert torch.equal(permuted, state[f"model.layers.1.self_attn.{name}.weight"])
    (tmp_path / "params.json").write_text(json.dumps({"dim": 32, "n_heads": 4, "n_kv_heads": 2}))
    back = Naming(("hf",), str(tmp_path / "params.json"))
    consolidate(str(tmp_path / "consolidated.00.pth"), str(tmp_path / "back"), naming=back)
    assert hash_tensors(str(tmp_path / "hf")).fingerprint == hash_tensors(str(tmp_path / "back")).fingerprint


def test_two_maps_lead_from_megatron_to_fms_and_back(tmp_path: Path) -> None:
    model = built("llama")
    model.save_pretrained(tmp_path / "hf")
    config = str(tmp_path / "hf" / "config.json")
    reshard(
        str(tmp_path / "hf"),
        str(tmp_path / "m"),
        target="megatron-dist",
        mesh=Mesh.parse("tp=2"),
        naming=Naming(("megatron",), config),
    )
    consolidate(str(tmp_path / "m"), str(tmp_path / "fms"), naming=Naming(("fms",), config))
    fused = load_file(tmp_path / "fms" / "model.safetensors")["base_model.layers.0.attn.in_proj.qkv_fused.weight"]
    assert (4 + 2 + 2) * 8 == len(fused)
    consolidate(str(tmp_path / "fms"), str(tmp_path / "back"), naming=Naming(("hf",), config))
    assert hash_tensors(str(tmp_path / "hf")).fingerprint == hash_tensors(str(tmp_path / "back")).fingerprint


@pytest.mark.slow
def test_config_of_a_megatron_checkpoint_builds_the_model(tmp_path: Path) -> None:
    import transformers as hf

    path = next(Case("megatron", "tdist_tp2_model_only").targets()).path
    values = (("norm_epsilon", "1e-5"), ("rotary_base", "10000"), ("vocab_size", "96"))
    result = consolidate(str(path), str(tmp_path / "out"), naming=Naming(("hf",), None, values))
    assert () == result.notes
    model, told = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert ("StableLmForCausalLM", 0, 0) == (type(model).__name__, len(told["missing_keys"]), len(told["unexpected_keys"]))
    assert math.isfinite(float(model(torch.arange(8)[None]).logits.float().sum()))
