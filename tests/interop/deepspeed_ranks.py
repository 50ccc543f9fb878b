"""Trains a tiny model with the real DeepSpeed engine on CPU ranks; run as a script, one process per rank.

    python deepspeed_ranks.py OPTIONS.json

The file holds a list of runs, done one after the other in the same processes, since importing DeepSpeed takes longest.
Options of a run: ranks, directory, stage, dtype (fp32, bf16, fp16), acts, universal, losses (file for the losses of the first
rank), state (file for parameters and optimizer state at the end), zero (further zero_optimization settings), config (further
settings), groups, frozen, tied, hidden, adapters, half_buffers, more (further parameters of the model, name -> shape),
same_batch, is_without_frozen (what is saved).

Acts are done in order: ["load", tag], ["steps", n], ["save", tag], ["save_weights", file name].
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

TOKENS = 31


def model_of(options: dict[str, Any]):
    import torch

    class Model(torch.nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(TOKENS, hidden)
            self.odd = torch.nn.Parameter(torch.linspace(0.5, 1.5, 7))
            self.norm = torch.nn.LayerNorm(hidden)
            self.up = torch.nn.Linear(hidden, 2 * hidden + 1)
            self.down = torch.nn.Linear(2 * hidden + 1, hidden)
            self.frozen = torch.nn.Linear(hidden, hidden)
            self.head = torch.nn.Linear(hidden, TOKENS, bias=False)
            self.register_buffer("scale", torch.tensor([0.5, 0.25]))
            self.register_buffer("count", torch.arange(3))
            for name, shape in options.get("more", {}).items():
                self.register_parameter(name, torch.nn.Parameter(torch.full(shape, 0.75)))
            if options.get("half_buffers"):
                self.scale = self.scale.half()
            if options.get("adapters"):  # the base is frozen, and small matrices beside it are trained
                self.requires_grad_(False)
                self.lora_a = torch.nn.Linear(hidden, 3, bias=False)
                self.lora_b = torch.nn.Linear(3, hidden, bias=False)
            if options.get("tied", True):
                self.head.weight = self.embed.weight
            if options.get("frozen", True) and not options.get("adapters"):
                self.frozen.requires_grad_(False)

        def forward(self, tokens):
            x = self.embed(tokens) * self.odd.sum().to(self.embed.weight.dtype)
            for name in options.get("more", {}):
                x = x + getattr(self, name).sum().to(x.dtype)
            if options.get("adapters"):
                x = x + self.lora_b(self.lora_a(x))
            x = x + self.down(torch.tanh(self.up(self.norm(x)))) + self.frozen(x) * self.scale[0].to(x.dtype)
            target = tokens.roll(1, 1)
            return torch.nn.functional.cross_entropy(self.head(x).float().view(-1, TOKENS), target.reshape(-1))

    torch.manual_seed(int(options.get("seed", 1)))
    return Model(int(options.get("hidden", 12)))


def groups_of(model, options: dict[str, Any]):
    params = [p for p in model.parameters() if p.requires_grad]
    groups = options.get("groups", 2)
    if groups == 1 or options.get("adapters"):
        return [{"params": params}]
    if groups == 3:
        tied = [model.embed.weight]
        return [{"params": [p for p in params if p is not tied[0]]}, {"params": tied, "weight_decay": 0.0}]
    return [
        {"params": [p for p in params if len(getattr(p, "ds_shape", p.shape)) > 1], "weight_decay": 0.1},
        {"params": [p for p in params if len(getattr(p, "ds_shape", p.shape)) < 2], "weight_decay": 0.0},
    ]


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    stage, dtype = options["stage"], options.get("dtype", "bf16")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "overlap_comm": False, **options.get("zero", {})},
        **options.get("config", {}),
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **options.get(dtype, {})}
    if options.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    return config


def state_of(engine) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"{name}.fp32"] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq") if engine.zero_optimization_stage() == 3 else ():  # others link it lazily
                found[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key)
    return {k: v.detach().clone() for k, v in found.items() if v is not None}


def optimizer_of(model, options: dict[str, Any]):
    if options.get("zero", {}).get("offload_optimizer"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups_of(model, options), lr=0.01)
    import torch

    return torch.optim.AdamW(groups_of(model, options), lr=0.01)


def one_step(engine, rank: int, options: dict[str, Any]) -> list[float]:
    """The losses of a step's micro batches; a batch depends on the counters of the engine alone."""
    import torch

    losses = []
    parts = engine.gradient_accumulation_steps()
    for part in range(parts):
        torch.manual_seed(1000 + engine.global_steps * parts + part)
        tokens = torch.randint(0, TOKENS, (4, 5))
        if not options.get("same_batch", True):
            tokens = (tokens + rank) % TOKENS
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def train(rank: int, options: dict[str, Any]) -> None:
    import deepspeed
    import torch

    model = model_of(options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model, options), config=config_of(options))
    losses: list[float] = []
    for act, value in options["acts"]:
        if act == "load":
            path, _ = engine.load_checkpoint(options["directory"], tag=value)
            assert path, "nothing was loaded"
        elif act == "steps":
            losses += [loss for _ in range(value) for loss in one_step(engine, rank, options)]
        elif act == "save":
            client = {"epoch": 2, **options.get("client", {})}
            extra = {"exclude_frozen_parameters": True} if options.get("is_without_frozen") else {}
            engine.save_checkpoint(options["directory"], tag=value, client_state=client, **extra)
        elif act == "save_weights":
            engine.save_16bit_model(options["directory"], value)
        else:
            raise ValueError(act)
    if options.get("state"):
        found = state_of(engine)
        if rank == 0:
            torch.save(found, options["state"])
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
    linear = torch.nn.functional.linear
    for options in runs:
        torch.nn.functional.linear = linear  # an engine of ZeRO 3 leaves one of its own behind, which rounds otherwise
        train(int(os.environ["RANK"]), options)
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of torch that are left over sometimes abort a process that ends by itself


if __name__ == "__main__":
    main()
