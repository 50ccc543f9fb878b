"""Loads a torch_dist directory with megatron-core in one process; prints a SHA-256 per tensor. Run as a script.

python megatron_load.py DIRECTORY plain            every tensor of the directory, and the keys of the shared state
python megatron_load.py DIRECTORY model ARGS_JSON  a GPTModel of these settings, loaded through its own sharded state dict
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile

import torch


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def start() -> None:
    from megatron.core import parallel_state

    store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    torch.cuda.set_device = lambda *_: None


def plain(directory: str) -> dict[str, object]:
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_plain_tensors(directory)
    common = dist_checkpointing.load_common_state_dict(directory)
    return {
        "tensors": {k: digest(v) for k, v in tensors.items() if isinstance(v, torch.Tensor)},
        "common": sorted(map(str, common)),
    }


def model(directory: str, settings: dict[str, object]) -> dict[str, object]:
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    vocabulary, length = settings.pop("vocabulary"), settings.pop("length")
    experts = settings.get("num_moe_experts")
    config = TransformerConfig(use_cpu_initialization=True, params_dtype=torch.bfloat16, **settings)
    spec = get_gpt_layer_local_spec(num_experts=experts)
    built = GPTModel(config, spec, vocabulary, length, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    state = {"model": built.sharded_state_dict()}
    loaded = dist_checkpointing.load(state, directory)
    built.load_state_dict(loaded["model"], strict=False)
    return {"tensors": {k: digest(v) for k, v in built.state_dict().items() if isinstance(v, torch.Tensor)}}


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    start()
    answer = plain(sys.argv[1]) if sys.argv[2] == "plain" else model(sys.argv[1], json.loads(sys.argv[3]))
    sys.stdout.write("ANSWER " + json.dumps(answer) + "\n")
