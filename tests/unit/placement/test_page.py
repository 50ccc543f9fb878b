"""Holds docs/reference/placement-rules.md to the code: its file parses, its example is true, its tables whole."""

from __future__ import annotations

import re
from pathlib import Path

from ckpttools.dtypes import parse_dtype
from ckpttools.model import Mesh, TensorSpec
from ckpttools.placement import counts, globs, rule_files
from ckpttools.placement.assign import place
from ckpttools.placement.counts import Counts
from ckpttools.placement.rule_files import BUILT_IN, OTHERS, built_in, parse_rules

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "placement-rules.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLE = {
    "model.embed_tokens.weight": (96, 32),
    "model.layers.0.self_attn.qkv_proj.weight": (64, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.mlp.w12.weight": (128, 32),
    "model.layers.0.input_layernorm.weight": (32,),
    "score.weight": (2, 32),
}


def rows_after(mark: str) -> list[str]:
    """The rows of a table that stand below a comment."""
    return [line for line in TEXT.partition(f"<!-- {mark} -->\n")[2].partition("\n\n")[0].splitlines() if line]


def example() -> str:
    match = re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert match is not None
    return match[1]


def test_every_built_in_set_is_listed_with_what_it_is_for() -> None:
    assert [f"| `{name}` | {built_in(name).about} |" for name in BUILT_IN + OTHERS] == rows_after("built-in")


def test_the_example_is_what_is_done() -> None:
    rules = parse_rules(example(), "mine.toml")
    tensors = [(TensorSpec(n, parse_dtype("float32"), s), tuple(n.split(".")), "model") for n, s in EXAMPLE.items()]
    found = place(tensors, Mesh.parse("tp=2"), rules, Counts(heads=4, kv_heads=2), is_even=True)
    assert found.problems == ()
    expected = []
    for tensor in found.tensors:
        dim = next((cut.dim for cut in tensor.placement.cuts), None)
        told = []
        for rank in range(2):
            local = tensor.local(found.mesh, rank)
            assert local is not None
            runs = [f"{p.box.offsets[dim]}-{p.box.stops[dim] - 1}" for p in local.parts] if dim is not None else []
            told.append(f"{'rows' if dim == 0 else 'columns'} {', '.join(runs)}" if runs else "all")
        shape = ", ".join(map(str, tensor.spec.shape))
        expected.append(f"| `{tensor.spec.name}` | [{shape}] | {told[0]} | {told[1]} |")
    assert expected == rows_after("example")


def test_every_key_and_wrapper_and_key_of_a_config_is_described() -> None:
    keys = [*rule_files._TOP, *(f"rules.{k}" for k in rule_files._RULE), *(f"stages.{k}" for k in rule_files._STAGES)]
    described = set(re.findall(r"`([\w.]+)`", TEXT))
    assert set(keys) - {"rules", "stages", "experts"} - described == set()
    assert globs.WRAPPERS - described == set()
    for count in ("heads", "kv_heads"):
        assert counts._KEYS[count][0] in described
