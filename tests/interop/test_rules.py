"""The built-in rules against what transformers does to real models: its tensor-parallel plans, and its expert-parallel ones.

Each model is built small; its plan is applied for two ranks by transformers itself, in one process that stands for either.
Every parameter counts its own elements, so a rank's local tensor says which of them it holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpttools.dtypes import parse_dtype
from ckpttools.model import Mesh, TensorSpec
from ckpttools.placement.assign import Assignment, place
from ckpttools.placement.counts import Counts, counts_of
from ckpttools.placement.rule_files import choose

pytestmark = pytest.mark.interop
pytest.importorskip("transformers", reason="needs transformers, whose models and plans are the measure")

_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_routed_experts": 4,
}  # fmt: skip
_GPT = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128, "n_positions": 32}
_FALCON = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}


@dataclass(frozen=True)
class Kind:
    """A kind of model, small."""

    config: dict[str, Any]
    rules: str
    whole: tuple[str, ...] = ()
    """Ends of the names of matrices in layers that every rank holds whole."""
    otherwise: tuple[str, ...] = ()
    """Ends of the names that the plan cuts in another way, or not at all (it gathers the output of the whole layer)."""
    has_plan: bool = True


MODELS = {
    "llama": Kind(_SMALL, "llama"),
    "mistral": Kind(_SMALL, "llama"),
    "qwen2": Kind(_SMALL, "llama"),
    "qwen3": Kind(_SMALL | {"head_dim": 16}, "llama"),
    "gemma2": Kind(_SMALL | {"head_dim": 16}, "llama"),
    # the plan cuts fused rows without regard to what they are, and gathers them before use
    "phi3": Kind(_SMALL, "llama", otherwise=("qkv_proj.weight", "gate_up_proj.weight")),
    "mixtral": Kind(_SMALL | {"num_local_experts": 4}, "mixtral", whole=("mlp.gate.weight",)),
    "qwen3_moe": Kind(
        _SMALL | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}, "mixtral", whole=("mlp.gate.weight",)
    ),
    "qwen2_moe": Kind(
        _SMALL | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        "mixtral",
        whole=("mlp.gate.weight", "shared_expert_gate.weight"),
        otherwise=("shared_expert.gate_proj.weight", "shared_expert.up_proj.weight", "shared_expert.down_proj.weight"),
    ),
    "deepseek_v3": Kind(
        _SMALL | _LATENT | {"num_key_value_heads": 4},
        "mixtral",
        whole=("mlp.gate.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
        otherwise=("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"),
    ),
    "gpt_oss": Kind(
        _SMALL | {"num_local_experts": 4, "head_dim": 16},
        "gpt_oss",
        whole=("mlp.router.weight", "down_proj_bias"),
        has_plan=False,
    ),
    "deepseek_v2": Kind(
        _SMALL | _LATENT | {"num_key_value_heads": 4, "head_dim": 8},
        "mixtral",
        whole=("mlp.gate.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    ),
    "glm4_moe": Kind(
        _SMALL | _LATENT | {"num_key_value_heads": 2, "head_dim": 16, "n_group": 1}, "mixtral", whole=("mlp.gate.weight",)
    ),
    "glm": Kind(_SMALL | {"head_dim": 16}, "llama", otherwise=("gate_up_proj.weight",)),
    "glm4": Kind(_SMALL | {"head_dim": 16}, "llama", otherwise=("gate_up_proj.weight",)),
    "gemma": Kind(_SMALL | {"head_dim": 16}, "llama"),
    "gemma3_text": Kind(_SMALL | {"head_dim": 16}, "llama"),
    "starcoder2": Kind(_SMALL, "llama"),
    "cohere": Kind(_SMALL, "llama"),
    "olmo2": Kind(_SMALL, "llama"),
    "phi": Kind(_SMALL, "llama"),
    "gptj": Kind(_GPT | {"rotary_dim": 8}, "gptj"),
    # no plans: what a rank holds is told by the models' own ways to take query, key and value apart (below)
    "falcon": Kind(_FALCON, "falcon", has_plan=False),
    "gpt_bigcode": Kind(_GPT, "gpt_bigcode", has_plan=False),
    "gpt_neox": Kind(_SMALL, "gpt_neox"),
    "gpt2": Kind(_GPT, "gpt2", has_plan=False),
    "bloom": Kind({"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}, "bloom", has_plan=False),
    "t5": Kind({"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 96, "num_layers": 2, "vocab_size": 128}, "t5", has_plan=False),
}

_SCRIPT = r"""
import json, re, sys, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

def build(kind, config):
    config = AutoConfig.for_model(kind, **config)
    return (AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM).from_config(config).float()

def fill(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape))

rank, told = int(sys.argv[1]), {}
dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
for kind, (config, has_plan) in json.load(sys.stdin).items():
    model = build(kind, config)
    shapes = {n: list(p.shape) for n, p in model.named_parameters()}
    local = {}
    if has_plan:
        fill(model)
        plan = {}
        for pattern, style in model.tp_plan.items():
            # a plan names modules or parameters; what is cut are the parameters
            matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+") + r"(\.(weight|bias))?")
            plan |= {name: style for name in shapes if matching.fullmatch(name)}
        apply_tensor_parallelism(model, mesh, plan)
        for name, p in model.named_parameters():
            p = p.to_local() if hasattr(p, "to_local") else p
            local[name] = [list(p.shape), p.detach().flatten().long().tolist()]
    told[kind] = {"shapes": shapes, "local": local}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What transformers says, per rank."""
    asked = json.dumps({kind: (model.config, model.has_plan) for kind, model in MODELS.items()})
    found = []
    for rank in ("0", "1"):
        command = [sys.executable, "-c", _SCRIPT, rank]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def placed(kind: str, shapes: dict[str, list[int]], mesh: str) -> Assignment:
    rules = choose(shapes)
    assert rules is not None
    assert rules.name == MODELS[kind].rules
    tensors = [(TensorSpec(n, parse_dtype("float32"), tuple(s)), tuple(n.split(".")), "model") for n, s in shapes.items()]
    counts = Counts() if kind.startswith("deepseek") else counts_of(MODELS[kind].config | {"model_type": kind}, kind)
    return place(tensors, Mesh.parse(mesh), rules, counts, is_even=True, copies_heads=True)


@pytest.mark.parametrize("kind", MODELS)
def test_every_matrix_of_a_layer_is_cut_or_whole_on_purpose(kind: str, told: list[dict[str, Any]]) -> None:
    shapes = told[0][kind]["shapes"]
    found = placed(kind, shapes, "tp=2")
    assert found.problems == ()
    whole = {t.spec.name for t in found.tensors if not t.placement.cuts}
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and found.rules.layer_of(name) is not None}
    assert matrices
    assert {name for name in matrices & whole if not name.endswith(MODELS[kind].whole or ("?",))} == set()
    assert all(any(name.endswith(end) for name in matrices & whole) for end in MODELS[kind].whole)


@pytest.mark.parametrize("kind", [kind for kind, model in MODELS.items() if model.has_plan])
def test_two_ranks_hold_what_the_plan_of_transformers_gives_them(kind: str, told: list[dict[str, Any]]) -> None:
    import numpy as np

    shapes = told[0][kind]["shapes"]
    found = placed(kind, shapes, "tp=2")
    compared = 0
    for tensor in found.tensors:
        name = tensor.spec.name
        # the plan leaves embeddings whole and cuts the head; a tied pair is one tensor that it cannot cut in two ways
        if name.endswith((*MODELS[kind].otherwise, "embed_tokens.weight", "embed_in.weight", "lm_head.weight")):
            continue
        whole = np.arange(tensor.spec.volume).reshape(tensor.spec.shape)
        for rank in range(2):
            local = tensor.local(found.mesh, rank)
            assert local is not None
            ours = np.empty(local.shape, dtype=np.int64)
            for part in local.parts:
                into, of = (tuple(map(slice, b.offsets, b.stops)) for b in (part.local, part.box))
                ours[into] = whole[of]
            shape, values = told[rank][kind]["local"][name]
            assert (list(local.shape), ours.flatten().tolist()) == (shape, values), f"{name} on rank {rank}"
        compared += bool(tensor.placement.cuts)
    assert compared >= 4


@pytest.mark.parametrize("kind", MODELS)
def test_stages_take_every_layer_and_experts_are_divided(kind: str, told: list[dict[str, Any]]) -> None:
    shapes = told[0][kind]["shapes"]
    mesh = "pp=2,ep=2" if MODELS[kind].rules in ("mixtral", "gpt_oss") else "pp=2"
    found = placed(kind, shapes, mesh)
    assert found.problems == ()
    everywhere = {t.spec.name for t in found.tensors if not t.placement.held_at}
    spared = {"shared.weight", "encoder.final_layer_norm.weight", "transformer.rotary_emb.inv_freq"}
    assert everywhere <= spared, everywhere - spared
    if "ep" in mesh:
        divided = {t.spec.name for t in found.tensors if any(cut.axis == "ep" for cut in t.placement.cuts)}
        assert divided == {name for name in shapes if ".experts." in name}


_NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}


@pytest.mark.parametrize(
    "settings",
    [{}, {"multi_query": False}, _NEW, _NEW | {"num_kv_heads": 4}],
    ids=["one head", "all heads", "two groups", "four groups"],
)
def test_a_rank_of_falcon_has_the_heads_that_a_smaller_model_would_take_apart(settings: dict[str, Any]) -> None:
    """Transformers' own splitting of fused rows, with a rank's counts, gives the rank's share of what it gives for all."""
    import torch
    from transformers import FalconConfig
    from transformers.models.falcon.modeling_falcon import FalconAttention

    config = FalconConfig(**(_FALCON | settings))
    attention = FalconAttention(config, layer_idx=0)
    name = "transformer.h.0.self_attention.query_key_value.weight"
    rows = attention.query_key_value.weight.shape[0]
    rules = choose({name: (rows, 64)}, "falcon")
    assert rules is not None
    spec = TensorSpec(name, parse_dtype("float32"), (rows, 64))
    counts = counts_of(config.to_dict(), "config.json")
    found = place([(spec, (name,), "model")], Mesh.parse("tp=2"), rules, counts, is_even=True, copies_heads=True)
    assert found.problems == ()
    whole = attention._split_heads(torch.arange(rows)[None, None])
    heads, groups = attention.num_heads, attention.num_kv_heads
    for rank in range(2):
        local = found.tensors[0].local(found.mesh, rank)
        assert local is not None
        own = [row for part in local.parts for row in range(part.box.offsets[0], part.box.stops[0])]
        attention.num_heads, attention.num_kv_heads = heads // 2, max(groups // 2, 1)
        for theirs, ours in zip(whole, attention._split_heads(torch.tensor(own)[None, None]), strict=True):
            share = theirs if theirs.shape[2] == 1 else theirs.chunk(2, dim=2)[rank]
            assert torch.equal(share, ours)
        attention.num_heads, attention.num_kv_heads = heads, groups


@pytest.mark.parametrize("is_one", [True, False])
def test_a_rank_of_gpt_bigcode_has_whole_heads(is_one: bool) -> None:
    from transformers import GPTBigCodeConfig

    config = GPTBigCodeConfig(**_GPT, multi_query=is_one)
    name, rows = "transformer.h.0.attn.c_attn.weight", 64 + 2 * (16 if is_one else 64)
    rules = choose({name: (rows, 64)}, "gpt_bigcode")
    assert rules is not None
    spec = TensorSpec(name, parse_dtype("float32"), (rows, 64))
    counts = counts_of(config.to_dict(), "config.json")
    found = place([(spec, (name,), "model")], Mesh.parse("tp=2"), rules, counts, is_even=True, copies_heads=True)
    held = []
    for rank in range(2):
        local = found.tensors[0].local(found.mesh, rank)
        assert local is not None
        held.append([row for part in local.parts for row in range(part.box.offsets[0], part.box.stops[0])])
    shared = list(range(64, 96))
    expected = [[*range(32), *shared], [*range(32, 64), *shared]] if is_one else [[*range(96)], [*range(96, 192)]]
    assert expected == held
