"""Fewer key/value heads than tensor-parallel ranks: ranks that are neighbours hold the same head, and it is read as one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Answer

Run = Callable[..., Answer]
HIDDEN, HEAD, QUERIES = 32, 8, 8
LAYER = "model.layers.0.self_attn."


def made(rows: int, columns: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + rows * columns, dtype=torch.float32).reshape(rows, columns)


def write_source(directory: Path, heads: int, *, is_fused: bool) -> dict[str, torch.Tensor]:
    query, key, value = made(QUERIES * HEAD, HIDDEN), made(heads * HEAD, HIDDEN, 10_000), made(heads * HEAD, HIDDEN, 20_000)
    tensors = {f"{LAYER}{n}_proj.weight": t for n, t in (("q", query), ("k", key), ("v", value))}
    tensors = {f"{LAYER}qkv_proj.weight": torch.cat([query, key, value])} if is_fused else tensors
    tensors |= {f"{LAYER}o_proj.weight": made(HIDDEN, QUERIES * HEAD, 30_000), "model.norm.weight": made(1, HIDDEN)[0]}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = {"num_attention_heads": QUERIES, "num_key_value_heads": heads, "hidden_size": HIDDEN, "head_dim": HEAD}
    (directory / "config.json").write_text(json.dumps(config))
    return tensors


def of_rank(tensors: dict[str, torch.Tensor], heads: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """A rank's tensors, as a linear layer for queries, keys and values is cut: query heads, and the head they attend to."""
    found = {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            found[name] = tensor
        elif "o_proj" in name:
            found[name] = tensor.chunk(ranks, dim=1)[rank]
        else:
            parts = tensor.split([QUERIES * HEAD, heads * HEAD, heads * HEAD]) if "qkv" in name else (tensor,)
            kinds = ("q", "k", "v") if "qkv" in name else (name.removeprefix(LAYER)[0],)
            shared = max(ranks // heads, 1)
            own = [p.chunk(ranks)[rank] if k == "q" else p.chunk(ranks // shared)[rank // shared]
                   for k, p in zip(kinds, parts, strict=True)]  # fmt: skip
            found[name] = torch.cat(own)
    return found


def files_of(target: str, out: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    if target == "vllm":
        return [load_file(out / f"model-rank-{rank}-part-0.safetensors") for rank in range(ranks)]
    paths = sorted(out.glob("*.pt"))
    assert ranks == len(paths)
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.mark.parametrize("is_fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("target", ["vllm", "torch"])
@pytest.mark.parametrize(("heads", "ranks"), [(1, 2), (1, 8), (2, 4), (2, 8), (4, 8), (4, 4), (8, 4)])
def test_each_rank_has_the_head_that_its_queries_attend_to(
    heads: int, ranks: int, target: str, is_fused: bool, ckpttools: Run, tmp_path: Path
) -> None:
    tensors = write_source(tmp_path / "source", heads, is_fused=is_fused)
    answer = ckpttools("reshard", tmp_path / "source", tmp_path / "out", "--to", target, "--mesh", f"tp={ranks}")
    assert answer.exit_code == 0, answer.stderr
    for rank, stored in enumerate(files_of(target, tmp_path / "out", ranks)):
        expected = of_rank(tensors, heads, rank, ranks)
        assert list(stored) == list(sorted(expected) if target == "vllm" else stored)
        assert all(torch.equal(expected[name], tensor) for name, tensor in stored.items())
    document = ckpttools("validate", tmp_path / "out", "--against", tmp_path / "source", "--json").document
    assert ("ok", []) == (document["verdict"], [f for f in document["findings"] if f["severity"] != "note"])


def test_copies_that_differ_are_a_finding(ckpttools: Run, tmp_path: Path) -> None:
    write_source(tmp_path / "source", 2, is_fused=False)
    ckpttools("reshard", tmp_path / "source", tmp_path / "out", "--to", "vllm", "--mesh", "tp=4")
    (tmp_path / "out" / "ckpttools-seal.json").unlink(missing_ok=True)
    path = tmp_path / "out" / "model-rank-3-part-0.safetensors"
    stored = path.read_bytes()
    value = load_file(path)[f"{LAYER}v_proj.weight"].numpy().tobytes()
    path.write_bytes(stored.replace(value, b"\x01" + value[1:]))
    answer = ckpttools("validate", tmp_path / "out", "--json")
    assert "replica-mismatch" in answer.codes
    assert "v_proj" in str(answer.document["findings"])


@pytest.mark.parametrize("target", ["dcp", "dtensor", "safetensors"])
def test_targets_that_record_global_boxes_refuse(target: str, ckpttools: Run, tmp_path: Path) -> None:
    write_source(tmp_path / "source", 2, is_fused=False)
    answer = ckpttools("reshard", tmp_path / "source", tmp_path / "out", "--to", target, "--mesh", "tp=4")
    assert answer.exit_code == 2
    assert "2 key/value heads cannot be divided evenly among tp=4" in answer.stderr


def test_ranks_that_heads_do_not_divide_are_refused(ckpttools: Run, tmp_path: Path) -> None:
    write_source(tmp_path / "source", 2, is_fused=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_attention_heads": 24, "num_key_value_heads": 2}))
    arguments = ("--to", "vllm", "--mesh", "tp=3", "--model-config", config)
    answer = ckpttools("reshard", tmp_path / "source", tmp_path / "out", *arguments)
    assert answer.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_metas_files_have_the_copies_that_its_own_resharding_makes(ckpttools: Run, tmp_path: Path) -> None:
    heads, ranks = 2, 4
    tensors = {
        "tok_embeddings.weight": made(64, HIDDEN),
        "layers.0.attention.wq.weight": made(QUERIES * HEAD, HIDDEN),
        "layers.0.attention.wk.weight": made(heads * HEAD, HIDDEN, 5),
        "layers.0.attention.wv.weight": made(heads * HEAD, HIDDEN, 7),
        "layers.0.attention.wo.weight": made(HIDDEN, QUERIES * HEAD),
        "norm.weight": made(1, HIDDEN)[0],
        "output.weight": made(64, HIDDEN),
    }
    (tmp_path / "source").mkdir()
    torch.save(tensors, tmp_path / "source" / "consolidated.00.pth")
    (tmp_path / "source" / "params.json").write_text(
        json.dumps({"dim": HIDDEN, "n_heads": QUERIES, "n_kv_heads": heads, "head_dim": HEAD})
    )
    answer = ckpttools("reshard", tmp_path / "source", tmp_path / "out", "--to", "llama", "--mesh", f"tp={ranks}")
    assert answer.exit_code == 0, answer.stderr
    for rank in range(ranks):
        stored = torch.load(tmp_path / "out" / f"consolidated.{rank:02d}.pth", weights_only=True)
        for kind in "kv":  # from one file per head: that file's rows, repeated, in equal parts
            name = f"layers.0.attention.w{kind}.weight"
            of_head = tensors[name].chunk(heads)[rank * heads // ranks]
            assert torch.equal(stored[name], of_head.repeat(ranks // heads, 1).chunk(ranks // heads)[rank % (ranks // heads)])
    assert "ok" == ckpttools("validate", tmp_path / "out", "--against", tmp_path / "source", "--json").document["verdict"]
    for path in (tmp_path / "out").glob("consolidated.*.pth"):  # as Meta writes them: without our note
        torch.save(torch.load(path, weights_only=True), path)
    (tmp_path / "out" / "ckpttools-seal.json").unlink(missing_ok=True)
    assert "ok" == ckpttools("validate", tmp_path / "out", "--against", tmp_path / "source", "--json").document["verdict"]
