"""Legacy Megatron checkpoints of any shape and mesh, cut with torch as Megatron's own layers cut: an oracle for the reader.

`Model` makes whole tensors, `Ranks.write` writes what `save_checkpoint` of each rank would write. Nothing of ckpttools is
used, and nothing here knows boxes.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Model:
    """Whole tensors of a GPT-like model under the names that a sharded checkpoint has, one per layer and expert."""

    layers: int = 4
    hidden: int = 16
    ffn: int = 24
    heads: int = 4
    groups: int = 2
    vocab: int = 48
    experts: int = 0
    is_gated: bool = True
    has_bias: bool = False
    norms_have_bias: bool = False
    is_tied: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def add(name: str, *shape: int) -> None:
            self.tensors[name] = torch.randn(*shape, generator=generator).to(self.dtype)

        def add_norm(name: str) -> None:
            add(f"{name}weight", self.hidden)
            if self.norms_have_bias:
                add(f"{name}bias", self.hidden)

        head = self.hidden // self.heads
        rows = (self.heads + 2 * self.groups) * head
        up = self.ffn * (2 if self.is_gated else 1)
        add("embedding.word_embeddings.weight", self.vocab, self.hidden)
        for i in range(self.layers):
            layer = f"decoder.layers.{i}"
            add_norm(f"{layer}.self_attention.linear_qkv.layer_norm_")
            add(f"{layer}.self_attention.linear_proj.weight", self.hidden, self.heads * head)
            if self.has_bias:
                add(f"{layer}.self_attention.linear_proj.bias", self.hidden)
            add(f"{layer}.self_attention.linear_qkv.weight", rows, self.hidden)
            if self.has_bias:
                add(f"{layer}.self_attention.linear_qkv.bias", rows)
            add_norm(f"{layer}.mlp.linear_fc1.layer_norm_")
            if self.experts:
                add(f"{layer}.mlp.router.weight", self.experts, self.hidden)
                for e in range(self.experts):
                    add(f"{layer}.mlp.experts.local_experts.{e}.linear_fc1.weight", up, self.hidden)
                    add(f"{layer}.mlp.experts.local_experts.{e}.linear_fc2.weight", self.hidden, self.ffn)
                continue
            add(f"{layer}.mlp.linear_fc1.weight", up, self.hidden)
            if self.has_bias:
                add(f"{layer}.mlp.linear_fc1.bias", up)
            add(f"{layer}.mlp.linear_fc2.weight", self.hidden, self.ffn)
            if self.has_bias:
                add(f"{layer}.mlp.linear_fc2.bias", self.hidden)
        add_norm("decoder.final_layernorm.")
        if not self.is_tied:
            add("output_layer.weight", self.vocab, self.hidden)


@dataclass
class Ranks:
    """A mesh, and how its ranks spell what they save."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    experts: str = "sequential"
    """`sequential`, `numbered` (Transformer Engine's grouped linear layers) or `grouped` (one matrix)."""
    is_local: bool = False
    """Whether the norms are modules of their own, as without Transformer Engine."""
    layer_counts: tuple[int, ...] = ()
    """Layers of each chunk in the order of numbers, where they are not equal."""
    optimizer: str = ""
    """`positions` (a state dict by number) or `buffers` (flat ones beside it)."""
    overrides: dict[str, object] = field(default_factory=dict)
    """Arguments that are written otherwise than they are."""

    def write(self, model: Model, directory: Path, iteration: int = 100) -> Path:
        """Write every rank's files below `directory`, and return it."""
        for tp in range(self.tp):
            for pp in range(self.pp):
                for ep in range(self.ep):
                    self._write_rank(model, directory / self.directory(tp, pp, ep), (tp, pp, ep), iteration)
        return directory

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tp, self.pp, self.ep

    def directory(self, tp: int, pp: int = 0, ep: int = 0) -> str:
        stage = f"_{pp:03d}" if self.pp > 1 else ""
        return f"mp_rank_{tp:02d}{stage}" + (f"_{ep:03d}" if self.ep > 1 else "")

    def chunks(self, model: Model, tp: int, pp: int, ep: int) -> list[OrderedDict[str, torch.Tensor]]:
        """The model state of a rank, one dict per virtual stage."""
        cells = [(v, p) for v in range(self.vpp) for p in range(self.pp)]
        counts = self.layer_counts or (model.layers // len(cells),) * len(cells)
        found = []
        for v in range(self.vpp):
            cell = cells.index((v, pp))
            first = sum(counts[:cell])
            state: OrderedDict[str, torch.Tensor] = OrderedDict()
            for name, tensor in model.tensors.items():
                local = self._local_name(name, cell, first, counts[cell], len(cells))
                if local is not None:
                    state[local] = cut(name, tensor, tp, self.tp, is_gated=model.is_gated)
            if model.is_tied and cell == len(cells) - 1 and len(cells) > 1:
                embedding = model.tensors["embedding.word_embeddings.weight"]
                state["output_layer.weight"] = cut("output_layer.weight", embedding, tp, self.tp, is_gated=False)
            found.append(self._spell(self._experts(model, state, ep)))
        return found

    def _local_name(self, name: str, cell: int, first: int, count: int, cells: int) -> str | None:
        if name.startswith("embedding."):
            return name if cell == 0 else None
        if not name.startswith("decoder.layers."):
            return name if cell == cells - 1 else None
        _, _, number, rest = name.split(".", 3)
        local = int(number) - first
        return f"decoder.layers.{local}.{rest}" if 0 <= local < count else None

    def _experts(self, model: Model, state: OrderedDict[str, torch.Tensor], ep: int) -> OrderedDict[str, torch.Tensor]:
        """The experts of one expert rank, in one of three spellings."""
        if not model.experts:
            return state
        here = model.experts // self.ep
        out: OrderedDict[str, torch.Tensor] = OrderedDict()
        grouped: dict[str, list[torch.Tensor]] = {}
        for name, tensor in state.items():
            before, found, after = name.partition(".local_experts.")
            if not found:
                out[name] = tensor
                continue
            number, _, rest = after.partition(".")
            local = int(number) - ep * here
            if not 0 <= local < here:
                continue
            linear, _, what = rest.rpartition(".")
            if self.experts == "sequential":
                out[f"{before}.local_experts.{local}.{rest}"] = tensor
            elif self.experts == "numbered":
                out[f"{before}.{linear}.{what}{local}"] = tensor
            else:
                key = f"{before}.{'weight1' if linear == 'linear_fc1' else 'weight2'}"
                grouped.setdefault(key, []).append(tensor)
                out[key] = tensor
        if self.experts == "numbered":  # all experts' first layers are before all second ones
            names = list(out)
            firsts: dict[str, int] = {}
            for i, name in enumerate(names):
                module, found, _ = name.partition(".experts.")
                firsts.setdefault(module if found else name, i)

            def place(name: str) -> tuple[int, bool]:
                return firsts[name.partition(".experts.")[0] if ".experts." in name else name], ".linear_fc2." in name

            out = OrderedDict((n, out[n]) for n in sorted(names, key=place))
        for key, tensors in grouped.items():
            joined = torch.stack([t.t().contiguous() for t in tensors])
            hidden = model.hidden
            out[key] = joined.reshape(hidden, -1) if key.endswith("weight1") else joined.reshape(-1, hidden)
        return out

    def _spell(self, state: OrderedDict[str, torch.Tensor]) -> OrderedDict[str, torch.Tensor]:
        if not self.is_local:
            return state
        renamed = ((n.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm."), t) for n, t in state.items())
        return OrderedDict((n.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."), t) for n, t in renamed)

    def arguments(self, model: Model) -> argparse.Namespace:
        values: dict[str, object] = {
            "num_layers": model.layers,
            "hidden_size": model.hidden,
            "ffn_hidden_size": model.ffn,
            "num_attention_heads": model.heads,
            "num_query_groups": model.groups,
            "group_query_attention": model.groups != model.heads,
            "padded_vocab_size": model.vocab,
            "vocab_size": model.vocab - 3,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "num_experts": model.experts or None,
            "untie_embeddings_and_output_weights": not model.is_tied,
            "swiglu": model.is_gated,
            "data_parallel_size": max(2, self.ep),
            "transformer_impl": "local" if self.is_local else "transformer_engine",
            "moe_grouped_gemm": self.experts != "sequential",
            "moe_use_legacy_grouped_gemm": self.experts == "grouped",
            "use_distributed_optimizer": self.optimizer == "buffers",
            "accumulate_allreduce_grads_in_fp32": True,
        }
        return argparse.Namespace(**(values | self.overrides))

    def _write_rank(self, model: Model, directory: Path, place: tuple[int, int, int], iteration: int) -> None:
        chunks = self.chunks(model, *place)
        keys = ["model"] if self.vpp == 1 else [f"model{i}" for i in range(self.vpp)]
        state: dict[str, object] = {
            "args": self.arguments(model),
            "checkpoint_version": 3.0,
            "iteration": iteration,
            **dict(zip(keys, chunks, strict=True)),
            "opt_param_scheduler": {"max_lr": 0.001, "num_steps": iteration},
            "rng_state": [{"torch_rng_state": torch.arange(8, dtype=torch.uint8) + place[0]}],
        }
        directory.mkdir(parents=True, exist_ok=True)
        if self.optimizer:
            save_optimizer(self, model, chunks, state, directory)
        torch.save(state, directory / "model_optim_rng.pt")


def cut(name: str, tensor: torch.Tensor, rank: int, ranks: int, *, is_gated: bool) -> torch.Tensor:
    """What a tensor-parallel rank holds, by the layer that the tensor belongs to."""
    if "layer_norm_" in name or "layernorm" in name or "router" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return tensor.clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(ranks, dim=1)[rank].clone()
    if "linear_fc1" in name and is_gated:
        return torch.cat([half.chunk(ranks, dim=0)[rank] for half in tensor.chunk(2, dim=0)])
    return tensor.chunk(ranks, dim=0)[rank].clone()


def state_of(name: str, what: str, tensor: torch.Tensor) -> torch.Tensor:
    """A state of the optimizer that belongs to this (whole) tensor and to no other."""
    generator = torch.Generator().manual_seed(hash((name, what)) % (1 << 31))
    if what == "fp32":
        return tensor.float()
    return torch.randn(tensor.shape, generator=generator)


def save_optimizer(
    ranks: Ranks, model: Model, chunks: list[OrderedDict[str, torch.Tensor]], state: dict[str, object], directory: Path
) -> None:
    """Add a rank's optimizer to its state, and write its flat buffers where it has them."""
    place = [int(n) for n in directory.name.removeprefix("mp_rank_").split("_")]
    place += [0] * (3 - len(place))
    if ranks.pp == 1 and ranks.ep > 1:
        place = [place[0], 0, place[1]]
    states = {what: ranks.chunks(_states(model, what), *place) for what in ("fp32", "exp_avg", "exp_avg_sq")}
    is_chain = bool(model.experts) and ranks.ep > 1
    dense, expert = [(c, n) for c, chunk in enumerate(chunks) for n in chunk if not (is_chain and ".experts." in n)], []
    if is_chain:
        expert = [(c, n) for c, chunk in enumerate(chunks) for n in chunk if ".experts." in n]
    saved = []
    flat = []
    for names, is_expert in ((dense, False), (expert, True)):
        if not names:
            continue
        if ranks.optimizer == "positions":
            saved.append(_by_position(chunks, states, names, is_expert))
        else:
            saved.append({"optimizer": {"param_groups": [{"is_expert_parallel": is_expert, "lr": 0.1, "step": 3}]}})
            flat.append(_flat(chunks, states, names))
    state["optimizer"] = saved if is_chain else saved[0]
    if flat:
        torch.save(flat if is_chain else flat[0], directory / "distrib_optim.pt")


def _states(model: Model, what: str) -> Model:
    other = Model(**{k: v for k, v in vars(model).items() if k not in ("tensors", "dtype")}, dtype=torch.float32)
    other.tensors = OrderedDict((n, state_of(n, what, t)) for n, t in model.tensors.items())
    return other


def _by_position(chunks, states, names, is_expert: bool) -> dict[str, object]:
    groups = [[p for p in names if chunks[p[0]][p[1]].ndim > 1], [p for p in names if chunks[p[0]][p[1]].ndim == 1]]
    settings, numbered, masters, at = [], {}, [], 0
    for group, decay in zip(groups, (1.0, 0.0), strict=True):
        ids = list(range(at, at + len(group)))
        at += len(group)
        settings.append({"wd_mult": decay, "lr": 0.1, "is_expert_parallel": is_expert, "params": ids})
        masters.append([states["fp32"][c][n] for c, n in group])
        for number, (c, n) in zip(ids, group, strict=True):
            moments = {what: states[what][c][n] for what in ("exp_avg", "exp_avg_sq")}
            numbered[number] = {"step": torch.tensor(3.0), **moments}
    return {"optimizer": {"state": numbered, "param_groups": settings}, "fp32_from_fp16_params": masters}


def _flat(chunks, states, names) -> dict[object, object]:
    """Per chunk one buffer: parameters in reverse, each from a multiple of 64 elements; what lies between is never read."""
    found: dict[object, object] = {"buckets_coalesced": True}
    index = 0
    for c in range(len(chunks)):
        mine = [n for chunk, n in names if chunk == c][::-1]
        if not mine:
            continue
        starts, at = [], 0
        for n in mine:
            at = -(-at // 64) * 64
            starts.append(at)
            at += chunks[c][n].numel()
        world: dict[str, object] = {}
        for key, what in (("param", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            flat = torch.full((at,), float("nan"))
            for n, start in zip(mine, starts, strict=True):
                flat[start : start + chunks[c][n].numel()] = states[what][c][n].reshape(-1)
            world[key] = flat
        world["numel_unpadded"] = at
        found[index] = {(torch.bfloat16, torch.float32): world}
        index += 1
    return found
