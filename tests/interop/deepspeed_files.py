"""The real DeepSpeed for tests: runs its engine on CPU ranks, and compares what it saves, to the bit and without our reader."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from ckpttools.gather import Gather
from ckpttools.layouts import open_snapshot
from tests.interop import rank_processes

SCRIPT = Path(__file__).parent / "deepspeed_ranks.py"


def run_ranks(directory: Path, *runs: dict[str, Any], script: Path = SCRIPT) -> None:
    """Train on ranks of the engine, one run after the other; fails with what a rank said."""
    rank_processes.run_ranks(script, directory, [{"directory": str(directory / "run"), **options} for options in runs])


def to_universal(tag: Path, out: Path) -> None:
    """What DeepSpeed's own converter makes of a tag."""
    from deepspeed.checkpoint.ds_to_universal import main

    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    main(Namespace(input_folder=str(tag), output_folder=str(out), **workers, **flags))


def fp32_of(tag: Path, **options: Any) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own script makes of a tag."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(tag.parent), tag=tag.name, **options)
    return {n: t.float() if t.is_floating_point() else t for n, t in found.items()}  # as its command line does


def states_of(tag: Path) -> dict[str, torch.Tensor]:
    """The optimizer's vectors as we read them, by name without the family."""
    snapshot = open_snapshot(str(tag), is_located=True)
    gather, found = Gather(snapshot.source, memory_bytes=1 << 24), {}
    for entry in snapshot.checkpoint:
        if entry.name.startswith("optimizer.state.") and entry.spec.dtype.name == "float32" and entry.spec.shape:
            data = b"".join(bytes(v) for v in gather.stream(entry))
            name = entry.name.removeprefix("optimizer.state.")
            found[name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(entry.spec.shape)
    return found


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def differing(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    return [n for n, t in expected.items() if n not in found or bits(found[n]) != bits(t)]


def differing_files(expected: Path, found: Path, pattern: str = "*.pt") -> list[str]:
    """Where the files of two directories hold something else, by path into their values.

    The configuration is passed over, and what a rank of ZeRO 3 has in its padding: memory that nothing was written to.
    """
    files = {p.relative_to(expected) for p in expected.glob(pattern)}
    assert files, f"nothing in {expected}"
    others = {p.relative_to(found) for p in found.glob(pattern)}
    return sorted(map(str, files ^ others)) + [
        place
        for file in sorted(files & others)
        for place in _differing(_load(expected / file), _load(found / file), str(file))
        if ".ds_config" not in place
    ]


def _load(path: Path) -> Any:
    value = torch.load(path, weights_only=False)
    rank = path.name.removeprefix("bf16_").removeprefix("zero_pp_rank_").partition("_")[0]
    flat = value.get("optimizer_state_dict", {}).get("fp32_flat_groups") if isinstance(value, dict) else None
    if flat is not None:
        model = torch.load(path.parent / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights_only=False)
        for vector, shapes in zip(flat, model["param_shapes"], strict=True):
            _clear_padding(vector.data, list(shapes.values()), int(rank), model["dp_world_size"])
    return value


def _clear_padding(vector: torch.Tensor, shapes: list[tuple[int, ...]], rank: int, ranks: int) -> None:
    at = 0
    for shape in shapes:
        share = -(-prod(shape) // ranks)
        held = max(0, min(prod(shape) - rank * share, share))
        vector[at + held : at + share] = 0
        at += share


def _differing(one: Any, other: Any, place: str) -> Iterator[str]:
    if torch.is_tensor(one) and torch.is_tensor(other):
        if bits(one) != bits(other):
            yield place
    elif hasattr(one, "items") and hasattr(other, "items"):
        for key in dict.fromkeys((*one, *other)):
            if key in one and key in other:
                yield from _differing(one[key], other[key], f"{place}.{key}")
            else:
                yield f"{place}.{key}"
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differing(a, b, f"{place}.{i}")
    elif type(one) is not type(other):
        yield place
    elif hasattr(one, "__dict__") and not isinstance(one, type) and vars(one):
        yield from _differing(vars(one), vars(other), place)
    elif one != other:
        yield place
