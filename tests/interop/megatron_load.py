"""Loads a torch_dist directory with megatron-core in one process; prints a SHA-256 per tensor. Run as a script.

python megatron_load.py DIRECTORY plain            every tensor of the directory, and the keys of the shared state
python megatron_load.py DIRECTORY model ARGS_JSON  a GPTModel of these settings, loaded through its own sharded state dict
python megatron_load.py FILE rank ARGS_JSON        the GPTModel of one rank (`ranks`: [rank, tp, pp, ep]), which takes a legacy
                                                   file's model, strictly
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
    tokens = settings.pop("tokens", vocabulary)
    experts = settings.get("num_moe_experts")
    config = TransformerConfig(use_cpu_initialization=True, params_dtype=torch.bfloat16, **settings)
    spec = get_gpt_layer_local_spec(num_experts=experts)
    built = GPTModel(config, spec, vocabulary, length, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    state = {"model": built.sharded_state_dict()}
    loaded = dist_checkpointing.load(state, directory)
    built.load_state_dict(loaded["model"], strict=False)
    ends = ("word_embeddings.weight", "output_layer.weight")  # whose further rows pad the vocabulary
    tensors = {k: v[:tokens] if k.endswith(ends) else v for k, v in built.state_dict().items() if isinstance(v, torch.Tensor)}
    return {"tensors": {k: digest(v) for k, v in tensors.items()}}


def rank(path: str, settings: dict[str, object]) -> dict[str, object]:
    """One of several ranks, alone in its process: collectives do nothing."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.moe import grouped_gemm_util
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    number, tp, pp, ep = settings.pop("ranks")
    torch.distributed.init_process_group("fake", rank=number, world_size=tp * pp * ep, store=FakeStore())
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    torch.cuda.set_device = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    vocabulary, length, is_tied = settings.pop("vocabulary"), settings.pop("length"), settings.pop("is_tied")
    experts = settings.get("num_moe_experts")
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None  # kernels, which nothing here runs
    config = TransformerConfig(
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **sizes,
        **settings,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=bool(settings.get("moe_grouped_gemm")))
    ends = {"pre_process": number < tp * ep, "post_process": number >= tp * ep * (pp - 1)}
    built = GPTModel(
        config, spec, vocabulary, length, position_embedding_type="rope", share_embeddings_and_output_weights=is_tied, **ends
    )
    stored = torch.load(path, weights_only=False)["model"]
    built.load_state_dict({k: v for k, v in built.state_dict().items() if not isinstance(v, torch.Tensor)} | stored)
    # norms are float32 in a model that is built without Transformer Engine, whatever the file has
    return {"tensors": {k: digest(v.bfloat16()) for k, v in built.state_dict().items() if isinstance(v, torch.Tensor)}}


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if sys.argv[2] != "rank":
        start()
    if sys.argv[2] == "plain":
        answer = plain(sys.argv[1])
    else:
        answer = {"model": model, "rank": rank}[sys.argv[2]](sys.argv[1], json.loads(sys.argv[3]))
    sys.stdout.write("ANSWER " + json.dumps(answer) + "\n")
