"""Maps of names: what they do to values, against torch; what they refuse, and how they say it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpttools.dtypes import parse_dtype
from ckpttools.errors import ConversionError, UsageError
from ckpttools.layouts import open_snapshot
from ckpttools.model import Extent, Piece, TensorEntry, TensorSpec
from ckpttools.names.convert import NamesError, convert, stacked
from ckpttools.names.hf_config import config_of
from ckpttools.names.maps import BUILT_IN, built_in, parse_map
from ckpttools.names.patterns import Pattern
from ckpttools.operations.convert import consolidate
from ckpttools.operations.naming import Naming

HEAD = 'sides = ["a", "b"]\n'


def converted(
    tmp_path: Path, text: str, tensors: dict[str, torch.Tensor], side: str = "b", **numbers: int
) -> dict[str, torch.Tensor]:
    """The tensors after a map and on disk, as a user's file does it; `side` is wanted."""
    tmp_path.mkdir(exist_ok=True)
    save_file(tensors, tmp_path / "source.safetensors")
    (tmp_path / "map.toml").write_text(text)
    (tmp_path / "config.json").write_text('{"heads_are": "in the settings"}')
    settings = tuple((name, str(n)) for name, n in numbers.items())
    naming = Naming((side, str(tmp_path / "map.toml")), str(tmp_path / "config.json"), settings)
    consolidate(str(tmp_path / "source.safetensors"), str(tmp_path / "out.safetensors"), naming=naming, is_overwriting=True)
    return load_file(tmp_path / "out.safetensors")


class TestPatterns:
    @pytest.mark.parametrize(
        ("text", "name", "values"),
        [
            ("a.{layer}.w", "a.12.w", {"layer": "12"}),
            ("a.{layer}.w", "a.x.w", None),
            ("a.{layer}.w", "a.0000012.w", None),
            ("a.{kind}", "a.b.c", None),
            ("a.{*rest}", "a.b.c", {"rest": "b.c"}),
            ("a.{fc}.weight{expert}", "a.fc1.weight10", {"fc": "fc1", "expert": "10"}),
            ("a.{layer}", "a.007", {"layer": "7"}),
        ],
    )
    def test_words_stand_for_what_they_say(self, text, name, values):
        assert Pattern.parse(text).match(name) == values

    @pytest.mark.parametrize("text", ["", "a.{", "a.{b}.{b}", "a{b", "a.*", "a[layer", "a[]", "[layer]", "a.{B}"])
    def test_braces_that_say_nothing_are_refused(self, text):
        with pytest.raises(UsageError):
            Pattern.parse(text)


class TestValues:
    @given(st.data())
    def test_parts_in_blocks_come_apart_and_together_again(self, tmp_path_factory, data):
        blocks = data.draw(st.integers(1, 3))
        shares = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
        unit, width = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
        rows = blocks * unit * sum(shares)
        whole = torch.arange(rows * width, dtype=torch.int32).reshape(rows, width)
        parts = ", ".join(f'"p{i}"' for i in range(len(shares)))
        text = f'{HEAD}[[rules]]\na = "w"\nb = [{parts}]\nblocks = {blocks}\nshares = {shares}\n'
        tmp_path = tmp_path_factory.mktemp("names")
        apart = converted(tmp_path / "1", text, {"w": whole})
        cut = [block.split([unit * n for n in shares]) for block in whole.chunk(blocks)]
        assert all(torch.equal(apart[f"p{i}"], torch.cat([c[i] for c in cut])) for i in range(len(shares)))
        assert torch.equal(converted(tmp_path / "2", text, apart, "a")["w"], whole)

    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 1, 0], [2, 0, 1], [1, 2, 0]], ids=str)
    def test_rows_are_counted_in_another_order_and_back(self, tmp_path, order, transpose):
        whole = torch.arange(24 * 2, dtype=torch.int16).reshape(24, 2)
        text = f'{HEAD}[[rules]]\na = "w"\nb = "v"\nrows = [2, 3, 0]\norder = {order}\ntranspose = {str(transpose).lower()}\n'
        there = converted(tmp_path / "1", text, {"w": whole})["v"]
        wanted = whole.reshape(2, 3, 4, 2).permute(*order, 3).reshape(24, 2)
        assert torch.equal(there, wanted.T if transpose else wanted)
        assert torch.equal(converted(tmp_path / "2", text, {"v": there}, "a")["w"], whole)

    def test_transposed_and_plain_tensors_go_there_and_back(self, tmp_path):
        text = f'{HEAD}[[rules]]\na = "w"\nb = "v"\ntranspose = true\n[[rules]]\na = "s"\nb = "t"\n'
        tensors = {"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(7.5)}
        there = converted(tmp_path / "1", text, tensors)
        assert torch.equal(there["v"], tensors["w"].T)
        back = converted(tmp_path / "2", text, there, "a")
        assert all(torch.equal(back[n], t) for n, t in tensors.items())

    def test_stacks_come_apart_and_together_again(self, tmp_path):
        same = '[same]\na = [["l.{layer}.{*r}", "l.{*r}[layer]"], ["l.{layer}.e.{expert}.{*r}", "l.{layer}.es.{*r}[expert]"]]\n'
        text = f'{HEAD}{same}[[rules]]\na = "l.{{layer}}.e.{{expert}}.w"\nb = "m.{{layer}}.{{expert}}"\n'
        whole = torch.arange(2 * 3 * 4, dtype=torch.int32).reshape(2, 3, 4)
        there = converted(tmp_path, text, {"l.es.w": whole})
        assert {f"m.{i}.{j}" for i, j in product(range(2), range(3))} == set(there)
        assert all(torch.equal(there[f"m.{i}.{j}"], whole[i, j]) for i, j in product(range(2), range(3)))
        entries = open_snapshot(str(tmp_path / "out.safetensors"), is_located=True).checkpoint.tensors
        map_ = parse_map(text, "m")
        (again,) = stacked(map_, "a", convert(map_, "b", entries, {}).tensors)
        assert ("l.es.w", (2, 3, 4)) == (again.name, again.spec.shape)


LAYERS = HEAD + '[[rules]]\na = "l.{layer}.w"\nb = ["l.{layer}.p", "l.{layer}.q"]\nblocks = "groups"\n'


def problems(tmp_path: Path, text: str, tensors: dict[str, torch.Tensor], side: str = "a", **counts: int) -> list[str]:
    save_file(tensors, tmp_path / "s.safetensors")
    entries = open_snapshot(str(tmp_path / "s.safetensors"), is_located=True).checkpoint.tensors
    with pytest.raises(NamesError) as raised:
        convert(parse_map(text, "m"), side, entries, counts)
    return list(raised.value.problems)


class TestRefusals:
    def test_source_that_no_rule_takes_is_named(self, tmp_path):
        told = problems(tmp_path, LAYERS, {"l.0.w": torch.ones(4), "x": torch.ones(1)}, groups=1)
        assert told == ["no rule takes it: x"]

    def test_part_that_is_not_there_is_named(self, tmp_path):
        told = problems(tmp_path, LAYERS, {"l.0.p": torch.ones(4), "l.0.q": torch.ones(4), "l.1.p": torch.ones(4)}, "b", groups=1)
        assert any("l.1.q" in text for text in told)

    def test_layer_that_is_not_there_is_named(self, tmp_path):
        told = problems(tmp_path, LAYERS, {"l.0.w": torch.ones(4), "l.2.w": torch.ones(4)}, groups=1)
        assert told == ["nothing fills l.1.w, which every such model has (rule 1 of m)"]

    def test_rows_that_the_groups_do_not_divide_are_told_with_the_numbers(self, tmp_path):
        (told,) = problems(tmp_path, LAYERS, {"l.0.w": torch.ones(8)}, groups=3)
        assert "8 rows cannot be divided into 3 blocks" in told

    def test_number_that_is_not_known_is_named(self, tmp_path):
        (told,) = problems(tmp_path, LAYERS, {"l.0.w": torch.ones(8)})
        assert "the number of groups is not known" in told

    def test_parts_of_different_widths_cannot_be_joined(self, tmp_path):
        (told,) = problems(tmp_path, LAYERS, {"l.0.p": torch.ones(4, 2), "l.0.q": torch.ones(4, 3)}, "b", groups=1)
        assert "[4, 2], [4, 3]" in told

    def test_parts_of_other_shares_than_stated_are_told(self, tmp_path):
        text = LAYERS + "shares = [2, 1]\n"
        (told,) = problems(tmp_path, text, {"l.0.p": torch.ones(4), "l.0.q": torch.ones(4)}, "b", groups=1)
        assert "rows" in told

    def test_more_true_rows_than_there_are(self, tmp_path):
        text = HEAD + '[[rules]]\na = "w"\nb = "v"\npadded = "vocab"\n'
        (told,) = problems(tmp_path, text, {"w": torch.ones(4, 2)}, vocab=5)
        assert "vocab is 5, and there are only 4 rows" in told

    def test_two_tensors_of_one_name(self, tmp_path):
        text = HEAD + '[same]\na = [["w", "old"]]\n[[rules]]\na = "w"\nb = "v"\n'
        assert problems(tmp_path, text, {"w": torch.ones(1), "old": torch.ones(1)}) == ["two tensors stand for one: w"]

    def test_different_dtypes_cannot_be_joined(self, tmp_path):
        save_file({"l.0.p": torch.ones(4), "l.0.q": torch.ones(4, dtype=torch.int8)}, tmp_path / "s.safetensors")
        entries = open_snapshot(str(tmp_path / "s.safetensors"), is_located=True).checkpoint.tensors
        with pytest.raises(ConversionError, match="different dtypes"):
            convert(parse_map(LAYERS, "m"), "b", entries, {"groups": 1})

    @pytest.mark.parametrize("shape", [(1 << 40, 0), (1 << 21, 0)], ids=str)
    def test_stack_of_more_layers_than_any_model_has_is_refused_at_once(self, shape):
        name = TensorSpec("l.w", parse_dtype("float32"), shape)
        entry = TensorEntry(name, ("l.w",), (Piece(name.box, Extent("f", 0, 0)),))
        text = HEAD + '[same]\na = [["l.{layer}.{*r}", "l.{*r}[layer]"]]\n[[rules]]\na = "l.{layer}.w"\nb = "m.{layer}"\n'
        with pytest.raises(NamesError, match="layers or experts"):
            convert(parse_map(text, "m"), "a", [entry], {})

    @pytest.mark.parametrize("groups", [0, -1, 1 << 40])
    def test_number_of_groups_that_no_model_has_is_refused_at_once(self, tmp_path, groups):
        (told,) = problems(tmp_path, LAYERS, {"l.0.w": torch.ones(0, 2)}, groups=groups)
        assert f"the number of groups is {groups}" in told

    def test_numbers_in_names_that_leave_most_out_are_refused_at_once(self, tmp_path):
        text = HEAD + '[[rules]]\na = "l.{layer}.e.{expert}"\nb = "m.{layer}.{expert}"\n'
        (told,) = problems(tmp_path, text, {"l.999999.e.0": torch.ones(1), "l.0.e.999999": torch.ones(1)})
        assert "most of `l.{layer}.e.{expert}` are not there" in told

    def test_optimizer_state_is_not_renamed_in_silence(self, ckpttools, tmp_path):
        path = Path("fixtures/megatron/tdist_tp2_dp2_distopt_fully_reshardable/ckpt/iter_0000010")
        answer = ckpttools("consolidate", path, tmp_path / "o", "--names", "hf", "--everything", "--format", "torch")
        assert (4, True) == (answer.exit_code, "--weights-only" in answer.said)

    def test_names_that_no_map_knows(self, ckpttools, tmp_path):
        save_file({"x": torch.ones(1)}, tmp_path / "s.safetensors")
        answer = ckpttools("consolidate", tmp_path / "s.safetensors", tmp_path / "o.safetensors", "--names", "hf")
        assert (4, True, False) == (answer.exit_code, "no map of names" in answer.said, (tmp_path / "o.safetensors").exists())

    @pytest.mark.parametrize("names", [["nowhere"], ["hf", "--names", "meta"], ["absent.toml"]], ids=str)
    def test_side_or_file_that_is_none(self, ckpttools, tmp_path, names):
        save_file({"model.norm.weight": torch.ones(1)}, tmp_path / "s.safetensors")
        answer = ckpttools("consolidate", tmp_path / "s.safetensors", tmp_path / "o.safetensors", "--names", *names)
        assert answer.exit_code in (2, 4)
        assert "Traceback" not in answer.said


class TestFiles:
    @pytest.mark.parametrize("name", BUILT_IN)
    def test_built_in_maps_say_what_they_are_for(self, name):
        assert built_in(name).about

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "sides = 3",
            'sides = ["a", "a"]\n[[rules]]\na = "x"\n',
            HEAD,
            HEAD + "rules = 5",
            HEAD + '[[rules]]\na = "x"\n',
            HEAD + '[[rules]]\na = "x"\nb = "y"\nc = "z"\n',
            HEAD + '[[rules]]\na = "x.{layer}"\nb = "y"\n',
            HEAD + '[[rules]]\na = ["x", "y"]\nb = ["z", "w"]\n',
            HEAD + '[[rules]]\na = "x[layer]"\nb = "y[layer]"\n',
            HEAD + '[[rules]]\na = "x"\nb = "y"\nblocks = 0\n',
            HEAD + '[[rules]]\na = "x"\nb = "y"\nblocks = true\n',
            HEAD + '[[rules]]\na = "x"\nb = "y"\nrows = [2, 0]\norder = [0]\n',
            HEAD + '[[rules]]\na = "x"\nb = "y"\nrows = [0, 0]\norder = [1, 0]\n',
            HEAD + '[[rules]]\na = "x"\nb = ["y", "z"]\nrows = [2, 0]\norder = [1, 0]\n',
            HEAD + '[[rules]]\na = "x"\nb = ["y", "z"]\nshares = [1]\n',
            HEAD + '[[rules]]\na = "x"\nb = "y"\ntranspose = 1\n',
            HEAD + '[[rules]]\na = "x"\nb = "y"\n[same]\na = [["u"]]\n',
            HEAD + '[[rules]]\na = "x"\nb = "y"\n[same]\na = [["u.{layer}", "v"]]\n',
            HEAD + 'same = 5\n[[rules]]\na = "x"\nb = "y"\n',
            HEAD + 'more = 5\n[[rules]]\na = "x"\nb = "y"\n',
            "not toml [",
        ],
    )
    def test_file_that_says_nothing_is_refused(self, text):
        with pytest.raises(UsageError):
            parse_map(text, "m.toml")


class TestConfig:
    def spec(self, **shapes: tuple[int, ...]):
        return {n.replace("__", "."): TensorSpec(n, parse_dtype("bfloat16"), s) for n, s in shapes.items()}

    def test_what_nothing_states_is_named(self):
        made = config_of(self.spec(model__embed_tokens__weight=(8, 4)), {"num_attention_heads": 2})
        assert {"max_position_embeddings", "rotary_base", "norm_epsilon"} == set(made.missing)

    def test_stretched_positions_come_along(self):
        settings = {"num_attention_heads": 2, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
        made = config_of(self.spec(model__embed_tokens__weight=(8, 4)), settings)
        assert {"rope_type": "llama3", "factor": 32.0}.items() <= dict(made.values["rope_scaling"]).items()
