"""Trains tiny models of several meshes with the real DeepSpeed engine on CPU ranks; run as a script, one process per rank.

    python deepspeed_mesh_ranks.py OPTIONS.json

The file holds a list of runs, done one after the other in the same processes. Options of a run: kind (tensor, pipe, moe), ranks,
tp, pp, ep, stage, dtype, directory, steps, save (tag), load (tag), universal, losses (file for the losses of the first rank),
config (further settings).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

HIDDEN, WORDS, LAYERS = 8, 24, 4
INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 21,
    "tp_replicated_parameter_patterns": [r".*norm\.(weight|bias)", r".*down\.bias", r"^\d+\.(weight|bias)$"],
    "parameter_with_row_parallelism_patterns": [r".*down\.weight"],
    "vocabulary_parameter_patterns": [r".*word_embeddings\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up\.weight"],
}


def modules(tp: int, tp_rank: int, group: Any) -> dict[str, Any]:
    """Layers whose weights are cut over tensor-parallel ranks, each a slice of what one rank would have."""
    import torch
    from torch import nn

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            if tp > 1:
                torch.distributed.all_reduce(grad := grad.contiguous(), group=group)
            return grad

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if tp > 1:
                torch.distributed.all_reduce(x := x.contiguous().clone(), group=group)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    def part(full: torch.Tensor, dim: int, halves: int = 1) -> nn.Parameter:
        pieces = [h.chunk(tp, dim)[tp_rank] for h in full.chunk(halves, dim)]
        parameter = nn.Parameter(torch.cat(pieces, dim).contiguous().clone())
        parameter.model_parallel = parameter.tensor_model_parallel = True
        return parameter

    class Cut(nn.Module):
        def __init__(self, rows: int, columns: int, dim: int, halves: int = 1) -> None:
            super().__init__()
            full = torch.randn(rows, columns) / columns**0.5
            self.weight = part(full, dim, halves)
            if halves == 1:
                self.bias = part(torch.randn(rows) / 8, 0) if dim == 0 else nn.Parameter(torch.randn(rows) / 8)

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word_embeddings = nn.Module()
            self.word_embeddings.weight = part(torch.randn(WORDS, HIDDEN), 0)

        def forward(self, tokens):
            weight = self.word_embeddings.weight
            local = tokens - tp_rank * weight.shape[0]
            inside = (local >= 0) & (local < weight.shape[0])
            found = nn.functional.embedding(local.clamp(0, weight.shape[0] - 1), weight)
            return Sum.apply(found * inside.unsqueeze(-1).to(found.dtype))

        def logits(self, x):
            own = Copy.apply(x) @ self.word_embeddings.weight.t()
            before, after = tp_rank * own.shape[-1], WORDS - (tp_rank + 1) * own.shape[-1]
            return Sum.apply(nn.functional.pad(own, (before, after)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.gate_up = Cut(4 * HIDDEN, HIDDEN, 0, halves=2)
            self.up = Cut(2 * HIDDEN, HIDDEN, 0)
            self.down = Cut(HIDDEN, 2 * HIDDEN, 1)

        def forward(self, x):
            y = Copy.apply(self.norm(x))
            gate, up = (y @ self.gate_up.weight.t()).chunk(2, -1)
            y = torch.sigmoid(gate) * up + y @ self.up.weight.t() + self.up.bias
            return x + Sum.apply(y @ self.down.weight.t()) + self.down.bias

    return {"Embed": Embed, "Block": Block}


def loss_of(logits, tokens):
    import torch

    return torch.nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), tokens.view(-1))


def tensor_model(options: dict[str, Any], grid: Any):
    import torch
    from torch import nn

    torch.manual_seed(3)
    made = modules(options.get("tp", 1), grid.get_slice_parallel_rank(), grid.get_slice_parallel_group())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = made["Embed"]()
            self.layers = nn.ModuleList(made["Block"]() for _ in range(2))
            self.final_norm = nn.LayerNorm(HIDDEN)
            self.register_buffer("scale", torch.tensor([0.5, 0.25]))

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return loss_of(self.embedding.logits(self.final_norm(x)), tokens)

    return Model()


def pipe_model(options: dict[str, Any], topology: Any):
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    torch.manual_seed(3)
    grid = PipelineParallelGrid(topology)
    made = modules(options.get("tp", 1), grid.get_slice_parallel_rank(), grid.get_slice_parallel_group())
    tied = {"key": "embed", "typename": made["Embed"], "tied_weight_attr": "word_embeddings.weight"}
    layers = [
        TiedLayerSpec(**tied),
        lambda x: x * 1,
        *(LayerSpec(made["Block"]) for _ in range(LAYERS)),
        LayerSpec(torch.nn.Dropout, 0.0),  # a layer without parameters, which has a file all the same
        LayerSpec(torch.nn.LayerNorm, HIDDEN),
        TiedLayerSpec(**tied, forward_fn=lambda module, x: module.logits(x)),
    ]
    return PipelineModule(
        layers,
        topology=topology,
        loss_fn=loss_of,
        partition_method=options.get("method", "type:Block"),
        seed_layers=True,
        seed_fn=lambda number: torch.manual_seed(int(number)),
    )


def moe_model(options: dict[str, Any]):
    import torch
    from deepspeed.moe.layer import MoE
    from torch import nn

    torch.manual_seed(3)
    ep = options.get("ep", 1)
    rank = int(os.environ["RANK"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, HIDDEN)
            self.moes = nn.ModuleList()
            for layer in range(2):
                expert = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
                moe = MoE(HIDDEN, expert, num_experts=4, ep_size=ep, k=1, min_capacity=0, capacity_factor=4.0, use_rts=False)
                for number, local in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
                    torch.manual_seed(100 + 10 * layer + rank % ep * (4 // ep) + number)
                    for parameter in local.parameters():
                        parameter.data.normal_(0, 0.3)
                self.moes.append(moe)
            torch.manual_seed(4)
            self.head = nn.Linear(HIDDEN, WORDS)

        def forward(self, tokens):
            x = self.embed(tokens)
            for moe in self.moes:
                y, _, _ = moe(x)
                x = x + y
            return loss_of(self.head(x), tokens)

    return Model()


def groups_of(model, kind: str) -> list[dict[str, Any]]:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"name": "decay", "weight_decay": 0.1, "params": [p for p in params if p.dim() > 1]},
        {"name": "nodecay", "weight_decay": 0.0, "params": [p for p in params if p.dim() < 2]},
    ]
    if kind == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return split_params_into_different_moe_groups_for_optimizer(groups)
    return groups


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    dtype = options.get("dtype", "bf16")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 if options["kind"] == "pipe" else 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": options["stage"], "overlap_comm": False},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        **options.get("config", {}),
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if options.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    return config


def built(options: dict[str, Any]):
    """(model, arguments of `initialize`)."""
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    kind, tp, pp = options["kind"], options.get("tp", 1), options.get("pp", 1)
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=options["ranks"] // (tp * pp))
    if kind == "pipe":
        return pipe_model(options, topology), {}
    if kind == "moe":
        return moe_model(options), {}
    grid = PipelineParallelGrid(topology)
    return tensor_model(options, grid), {"mpu": grid} if tp > 1 else {}


def train(rank: int, options: dict[str, Any]) -> None:
    import deepspeed
    import torch
    from deepspeed.utils import groups

    groups.mpu = None  # of the run before, as are these
    for name, known in vars(groups).items():
        if name.startswith("_EXPERT") and isinstance(known, dict):
            known.clear()
    model, arguments = built(options)
    optimizer = torch.optim.AdamW(groups_of(model, options["kind"]), lr=0.01, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(options), **arguments)
    if options.get("load"):
        path, _ = engine.load_checkpoint(options["directory"], tag=options["load"])
        assert path, "nothing was loaded"
    losses = []
    for _ in range(options.get("steps", 0)):
        torch.manual_seed(1000 + engine.global_steps)
        tokens = torch.randint(0, 21, (2, 5))
        if options["kind"] == "pipe":
            loss = engine.train_batch(iter([(tokens, tokens)] * 2))
        else:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
    if options.get("save"):
        info = {"universal_checkpoint_info": INFO} if options["kind"] in ("tensor", "pipe") else {}
        engine.save_checkpoint(options["directory"], tag=options["save"], client_state={"iteration": 3, **info})
    if options.get("losses") and rank == 0:
        with open(options["losses"], "w", encoding="utf-8") as file:
            json.dump(losses, file)
    torch.distributed.barrier()


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        runs = json.load(file)
    import deepspeed
    import torch

    torch.set_num_threads(1)
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.comm.torch.build_shm_op = lambda: None  # compiles for a minute, and hangs on what a killed run locked
    deepspeed.init_distributed("gloo")
    for options in runs:
        train(int(os.environ["RANK"]), options)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
