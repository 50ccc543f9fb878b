"""Trains tiny models in the rarer ways of DeepSpeed, on CPU ranks, and notes what is in memory; a script, one process per rank.

    python deepspeed_variants.py OPTIONS.json

The file holds a list of runs, done one after the other in the same processes. Options of a run: kind (`pipe`, `experts`,
`autoep`, `autotp`, `plain`), directory, stage, dtype, and what the function of that kind asks for. Beside the tag lies
`truth.pt`: weights by name, and optimizer state by (name, key), found through the addresses of live tensors and not by any
reader's arithmetic.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

HIDDEN, WORDS = 8, 12
TAG = "global_step2"
TIED_LINEAR = ("second", nn.Linear, HIDDEN, HIDDEN)
Fragment = tuple[str, str, int, torch.Tensor]
"""Parameter, key, first element, values."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.down = nn.Linear(3 * HIDDEN, HIDDEN)
        self.register_buffer("count", torch.arange(2))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)

    @property
    def weight(self):
        return self.words.weight

    def forward(self, tokens):
        return self.words(tokens)


class Model(nn.Module):
    """Experts between an embedding and a head."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.block, self.head = Embedding(), Block(), nn.Linear(HIDDEN, WORDS, bias=False)
        self.experts = nn.ModuleList(experts)

    def forward(self, tokens):
        x = self.block(self.embed(tokens))
        for layer in self.experts:
            x = x + layer(x)[0]
        return loss_of(self.head(x), tokens)


class EightBit(torch.optim.SGD):
    """Keeps state as 8-bit optimizers do: a code per element, and tables of other lengths."""

    def step(self, closure=None):
        super().step(closure)
        for p in (p for g in self.param_groups for p in g["params"] if p.numel()):
            codes = (torch.arange(p.numel()) % 251).to(torch.uint8).view(p.shape)
            self.state[p] = {"step": 2, "state1": codes, "qmap1": torch.linspace(-1, 1, 256), "absmax1": torch.ones(3)}


def loss_of(out, tokens):
    return nn.functional.cross_entropy(out.float().reshape(-1, out.shape[-1]), tokens.reshape(-1))


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": options["stage"], "overlap_comm": False},
        **options.get("config", {}),
    }
    if options["dtype"] != "fp32":
        config[options["dtype"]] = {"enabled": True}
    return config


def train(engine, steps: int = 2, **named: Any) -> None:
    for step in range(steps):
        torch.manual_seed(step + dist.get_rank())
        tokens = torch.randint(0, WORDS, (2, 4))
        loss = engine(input_ids=tokens, labels=tokens).loss if named.get("is_hf") else engine(tokens)
        engine.backward(loss)
        engine.step()


def pipe(options: dict[str, Any]) -> None:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def head(module, x):
        return nn.functional.linear(x, module.weight)

    tie = options.get("ties", True)
    second = [TiedLayerSpec(*TIED_LINEAR, tied_weight_attr=["weight", "bias"])] if tie else []
    layers = [TiedLayerSpec("embed", Embedding, tied_weight_attr="weight") if tie else LayerSpec(Embedding), *second]
    layers += [lambda x: x, *(LayerSpec(Block) for _ in range(3)), *second, LayerSpec(nn.LayerNorm, HIDDEN)]
    last = TiedLayerSpec("embed", Embedding, forward_fn=head, tied_weight_attr="weight")
    layers.append(last if tie else LayerSpec(nn.Linear, HIDDEN, WORDS))
    model = PipelineModule(layers, num_stages=2, loss_fn=loss_of, base_seed=7)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(options))
    torch.manual_seed(3)
    batches = iter([(t, t) for t in torch.randint(0, WORDS, (8, 2, 3))])
    for _ in range(2):
        engine.train_batch(batches)
    save(engine, options)


def experts(options: dict[str, Any]) -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    torch.manual_seed(5)
    layers = []
    for spread, number in ((1, 2), (2, 4)):
        expert = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        layers.append(MoE(HIDDEN, expert=expert, num_experts=number, ep_size=spread, min_capacity=4, use_rts=False))
    model = Model(layers)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config_of(options))
    train(engine)

    def rename(name: str) -> str:
        head, mark, rest = name.partition("experts.1.deepspeed_moe.experts.deepspeed_experts.")
        number, _, rest = rest.partition(".")
        return f"{head}{mark}{2 * dist.get_rank() + int(number)}.{rest}" if mark else name

    save(engine, options, rename)


def autoep(options: dict[str, Any]) -> None:
    import transformers
    from transformers.utils import output_capturing

    ask = output_capturing._CanRecordRegistry.get  # DeepSpeed asks with a default, which transformers 5 does not take
    output_capturing._CanRecordRegistry.get = lambda s, k, d=None: dict.get(s, k, d) if isinstance(k, str) else ask(s, k)
    torch.manual_seed(5)
    shape = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    settings = transformers.MixtralConfig(**shape, vocab_size=WORDS, num_local_experts=6, max_position_embeddings=8)
    model = transformers.MixtralForCausalLM(settings)
    experts = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral", "use_grouped_mm": False}
    config = {**config_of(options), "expert_parallel": {**experts, "disable_triton_grouped_mm": True}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    train(engine, is_hf=True)
    save(engine, options, is_fused=lambda name: name.endswith(("experts.w1", "experts.w2", "experts.w3")))


def autotp(options: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(5)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8, "n_ctx": 8, "rotary_dim": 2}
    if options["model"] == "codegen":  # cut by blocks that an affine map alone describes
        model = transformers.CodeGenForCausalLM(transformers.CodeGenConfig(**shape, vocab_size=WORDS))
    else:
        del shape["n_ctx"], shape["rotary_dim"]
        model = transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**shape, vocab_size=WORDS, multi_query=True))
    before = {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}
    config = {**config_of(options), "tensor_parallel": {"autotp_size": 2}}
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.save_checkpoint(options["directory"], tag=TAG)
    if dist.get_rank() == 0:
        states = {(n, "fp32"): p.float() for n, p in before.items()}
        torch.save({"weights": before, "states": states}, f"{options['directory']}/truth.pt")


def plain(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    model = Model([])
    params = list(model.parameters())
    groups = [{"params": params[g :: options["groups"]], "lr": 0.01 * (g + 1)} for g in range(options["groups"])]
    kind = EightBit if options.get("is_8bit") else torch.optim.AdamW
    engine, *_ = deepspeed.initialize(model=model, optimizer=kind(groups, lr=0.01), config=config_of(options))
    train(engine)
    save(engine, options)


def fragments_of(engine) -> list[Fragment]:
    """What this rank keeps of the optimizer: where a parameter lies in a flat vector is told by the address of its weight."""
    outer = engine.optimizer
    inner = getattr(outer, "optimizer", outer)
    names, found = {id(p): n for n, p in engine.module.named_parameters()}, []
    kind = type(outer).__name__
    if kind in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
        is_bf16 = kind == "BF16_Optimizer"
        groups, flats = (outer.bf16_groups, outer.bf16_groups_flat) if is_bf16 else (outer.bit16_groups, outer.bit16_groups_flat)
        masters = outer.fp32_groups_flat_partition if is_bf16 else outer.single_partition_of_fp32_groups
        for params, flat, master, ranks in zip(groups, flats, masters, outer.real_dp_process_group, strict=True):
            low, vectors = dist.get_rank(group=ranks) * master.numel(), vectors_of(inner, master)
            for p in params:
                at = (p.data_ptr() - flat.data_ptr()) // p.element_size()
                start, stop = max(at, low), min(at + p.numel(), low + master.numel())
                found += [(names[id(p)], k, start - at, v[start - low : stop - low].clone()) for k, v in vectors if start < stop]
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        for p in engine.module.parameters():
            group, at, _ = outer.grad_position[outer.get_param_id(p)]
            first = dist.get_rank(group=p.ds_process_group) * p.ds_tensor.ds_numel
            numel = max(0, min(p.ds_tensor.ds_numel, p.ds_numel - first))
            vectors = vectors_of(inner, outer.fp32_partitioned_groups_flat[group])
            found += [(names[id(p)], k, first, v[at : at + numel].clone()) for k, v in vectors]
    elif hasattr(outer, "fp32_groups"):
        pairs = [pair for g in zip(outer.fp16_groups, outer.fp32_groups, strict=True) for pair in zip(*g, strict=True)]
        found += [(names[id(p)], k, 0, v.clone()) for p, m in pairs for k, v in vectors_of(inner, m)]
    return found


def vectors_of(inner, master) -> list[tuple[str, torch.Tensor]]:
    """The master and what the optimizer keeps of it per element, flat."""
    states = [(k, v) for k, v in inner.state.get(master, {}).items() if torch.is_tensor(v) and v.numel() == master.numel()]
    return [(k, v.detach().reshape(-1)) for k, v in (("fp32", master), *states) if k != "step"]


def save(engine, options: dict[str, Any], rename=lambda name: name, is_fused=lambda name: False) -> None:
    """The checkpoint, and beside it what all ranks have in memory, put together on the first."""
    engine.save_checkpoint(options["directory"], tag=TAG, client_state={"epoch": 1})
    weights = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=options["stage"] == 3):
            weights[rename(name)] = p.detach().clone()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (weights, [(rename(n), *rest) for n, *rest in fragments_of(engine)]))
    if dist.get_rank():
        return
    truth: dict[str, Any] = {"weights": {}, "states": {}}
    for name in {n: None for own, _ in gathered for n in own}:
        holders = [own[name] for own, _ in gathered if name in own]
        truth["weights"][name] = torch.cat(holders) if is_fused(name) else holders[0]
    seen: set[str] = set()
    for rank, (own, fragments) in enumerate(gathered):
        new = [f for f in fragments if f[0] not in seen or options["kind"] != "pipe"]  # the first stage that has it counts
        for name, key, first, values in new:
            whole = truth["weights"][name]
            state = truth["states"].setdefault((name, key), torch.zeros(whole.shape, dtype=values.dtype))
            base = rank * own[name].numel() if is_fused(name) else 0
            state.view(-1)[base + first : base + first + values.numel()] = values
        seen |= {f[0] for f in fragments}
    torch.save(truth, f"{options['directory']}/truth.pt")


def forget_groups() -> None:
    """Let the next run make its own expert groups."""
    from deepspeed.utils import groups

    for name, value in list(vars(groups).items()):
        if name.startswith("_") and isinstance(value, dict) and ("PARALLEL" in name or "GROUP" in name):
            value.clear()
    groups.mpu = groups.mesh_device = groups._WORLD_GROUP = None


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        runs = json.load(file)
    torch.set_num_threads(1)
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.comm.torch.build_shm_op = lambda: None  # compiles for a minute, and is not needed
    deepspeed.init_distributed("gloo")
    for options in runs:
        forget_groups()
        os.makedirs(options["directory"], exist_ok=True)
        {"pipe": pipe, "experts": experts, "autoep": autoep, "autotp": autotp, "plain": plain}[options["kind"]](options)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
