"""Writes a ZeRO 3 checkpoint as DeepSpeed lays it out, without training: what a rank saves, byte for byte the same structure.

    python bench/make_deepspeed.py WORK/zero3 --ranks 4 --gigabytes 2

Needs deepspeed for the classes that its pickles name. Values are random; the sizes are those of a decoder-only model.
"""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from math import ceil
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

TAG = "global_step10"
BYTES_PER_PARAMETER = 12  # master, exp_avg, exp_avg_sq


def shapes(gigabytes: float) -> OrderedDict[str, torch.Size]:
    """Names and shapes of a model whose state takes about so many bytes."""
    hidden, found, numel = 1024, OrderedDict(), 0
    found["embed.weight"] = torch.Size([32003, hidden])
    layer = 0
    while numel * BYTES_PER_PARAMETER < gigabytes * 1e9:
        for name, size in (
            ("norm1.weight", [hidden]),
            ("qkv.weight", [3 * hidden, hidden]),
            ("proj.weight", [hidden, hidden]),
            ("norm2.weight", [hidden]),
            ("up.weight", [4 * hidden + 1, hidden]),
            ("down.weight", [hidden, 4 * hidden + 1]),
        ):
            found[f"layers.{layer}.{name}"] = torch.Size(size)
        layer += 1
        numel = sum(s.numel() for s in found.values())
    return found


def write_rank(directory: Path, rank: int, ranks: int, params: OrderedDict[str, torch.Size]) -> None:
    """The two files of one rank."""
    part = sum(ceil(s.numel() / ranks) for s in params.values())
    generator = torch.Generator().manual_seed(rank)

    def flat() -> torch.Tensor:
        return torch.randn(part, generator=generator)

    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    state = {"step": torch.tensor(10.0), "exp_avg": flat(), "exp_avg_sq": flat()}
    optimizer = {
        "zero_stage": ZeroStageEnum.weights,
        "loss_scaler": LossScaler(1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": [settings]},
        "fp32_flat_groups": [torch.nn.Parameter(flat())],
    }
    common = {"ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, "ds_version": "0.19.8"}
    path = directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": optimizer, **common}, path)
    model = {
        "module": OrderedDict((n, torch.empty(0, dtype=torch.bfloat16)) for n in params),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [params],
        "frozen_param_shapes": OrderedDict(),
        "shared_params": {},
        "frozen_param_fragments": OrderedDict(),
        "lr_scheduler": None,
        "global_steps": 10,
        "skipped_steps": 0,
        "global_samples": 80,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        **common,
    }
    torch.save(model, directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def main() -> None:
    """Parse the command line and write every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    options = parser.parse_args()
    directory = options.out / TAG
    directory.mkdir(parents=True, exist_ok=True)
    params = shapes(options.gigabytes)
    for rank in range(options.ranks):
        write_rank(directory, rank, options.ranks, params)
    (options.out / "latest").write_text(TAG)


if __name__ == "__main__":
    main()
