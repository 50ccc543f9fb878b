"""The format of rules: what is read, what is refused and how, patterns, and that printed rules are read back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import UsageError
from ckpttools.placement.globs import compile_globs, exact_glob, parse_glob, skeleton, tells_numbers_apart, unwrapped
from ckpttools.placement.rule_files import BUILT_IN, OTHERS, built_in, choose, parse_rules, render_rules
from ckpttools.placement.rules import Rule

RULE = '[[rules]]\ntensors = ["a.weight"]\naxis = "tp"\ndim = 0\n'


class TestPatterns:
    @pytest.mark.parametrize(
        ("glob", "name"),
        [
            ("q_proj.weight", "model.layers.0.q_proj.weight"),
            ("q_proj.weight", "q_proj.weight"),
            ("layers.*.w", "model.layers.10.w"),
            ("**inv_freq", "model.rotary_emb.original_inv_freq"),
            ("layers.**", "layers.0.a.b"),
            ("a.[qkv].w", "x.a.k.w"),
            ("a.[!qkv].w", "a.o.w"),
            ("a.[0-2]", "a.1"),
            ("a.?", "a.b"),
            ("^model.w", "model.w"),
        ],
    )
    def test_matches(self, glob: str, name: str) -> None:
        assert compile_globs([glob]).fullmatch(name)

    @pytest.mark.parametrize(
        ("glob", "name"),
        [
            ("proj.weight", "q_proj.weight"),
            ("layers.*.w", "layers.0.a.w"),
            ("q_proj.weight", "q_proj.weight.exp_avg"),
            ("q_proj.weight", "q_projxweight"),
            ("a.[!qkv].w", "a.q.w"),
            ("a.?", "a.bc"),
            ("^w", "model.w"),
        ],
    )
    def test_does_not_match(self, glob: str, name: str) -> None:
        assert not compile_globs([glob]).fullmatch(name)

    @pytest.mark.parametrize(
        ("glob", "why"),
        [
            ("", "1 to 400 characters"),
            ("a b", "no spaces"),
            ("a" * 500, "1 to 400 characters"),
            ("***", "neither"),
            ("a[", "closes or opens nothing"),
            ("a]", "closes or opens nothing"),
            ("a}", "closes or opens nothing"),
            ("[!]", "a set of nothing"),
            ("a^", "closes or opens nothing"),
            ("{head}", "not one of {layer}, {expert}"),
            ("{layer}.{layer}", "twice"),
            ("[z-a]", "not a set"),
            ("**a**a**a**a**a", "at most 4"),
        ],
    )
    def test_what_is_no_pattern_is_told(self, glob: str, why: str) -> None:
        with pytest.raises(ValueError, match=re.escape(why)):
            parse_glob(glob)

    @given(st.text(min_size=1, max_size=30))
    def test_any_text_is_a_pattern_or_an_error(self, text: str) -> None:
        try:
            compile_globs([text]).fullmatch("a.b.c")
        except ValueError:
            return

    @given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
    def test_the_exact_pattern_of_a_name_matches_it(self, name: str) -> None:
        assert compile_globs([exact_glob(name)]).fullmatch(name)

    @pytest.mark.parametrize("name", ["model._orig_mod.a.w", "model.a._checkpoint_wrapped_module.w", "model.a.base_layer.w"])
    def test_wrappers_are_not_part_of_a_name(self, name: str) -> None:
        assert unwrapped(name) == "model.a.w"

    def test_layers_of_a_model_share_a_skeleton(self) -> None:
        assert skeleton("layers.12.experts.3.w1") == skeleton("layers.0.experts.0.w1") == "layers.0.experts.0.w1"

    @pytest.mark.parametrize("glob", ["layers.0.w", "layers.[0-3].w", "layers.?.w", "layers.1*.w", "w**1", "layers.[!1].w"])
    def test_patterns_that_tell_layers_apart_are_known(self, glob: str) -> None:
        assert tells_numbers_apart(glob)

    @pytest.mark.parametrize("glob", ["layers.*.w1.weight", "**inv_freq", "a.[qkv].w", "layers.{layer}.**"])
    def test_patterns_that_do_not_tell_layers_apart_are_known(self, glob: str) -> None:
        assert not tells_numbers_apart(glob)

    def test_a_rule_for_one_layer_is_for_that_layer(self) -> None:
        rules = parse_rules(RULE.replace("a.weight", "layers.1.w"), "mine")
        assert [bool(rules.matching(f"layers.{i}.w")) for i in range(3)] == [False, True, False]


class TestFormat:
    def test_rules_of_a_file_go_before_those_that_it_includes(self) -> None:
        rules = parse_rules('include = ["llama"]\n' + RULE.replace("a.weight", "o_proj.weight"), "mine.toml")
        first, *_ = rules.matching("model.layers.0.self_attn.o_proj.weight")
        assert (first.dim, first.label) == (0, "rule 1 of mine.toml")
        assert rules.stages == built_in("llama").stages

    def test_what_a_file_replicates_is_cut_by_no_rule_of_it(self) -> None:
        rules = parse_rules('include = ["llama"]\nreplicate = ["lm_head.weight"]\n', "mine.toml")
        assert [rule.axis for rule in rules.matching("lm_head.weight")] == [""]

    def test_built_in_buffers_are_the_end_of_every_set(self) -> None:
        assert [rule.label for rule in parse_rules("", "mine").matching("rotary_emb.inv_freq")] == ["`replicate` of buffers"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("rules = [", "not a TOML file: mine.toml"),
            ("a = " + "[" * 20_000, "not a TOML file: mine.toml"),
            ("colour = 1", "unknown key `colour`"),
            ("rules = 3", "`rules` is not a list of tables"),
            ("\n\n" + RULE + RULE.replace("axis", "axes"), "rule 2 (line 7): unknown key `axes`"),
            (RULE.replace('"tp"', '"cp"'), "rule 1 (line 1): `axis` is none that a rule can cut along"),
            (RULE.replace('"tp"', '"dp"'), "`axis` is none"),
            (RULE.replace('axis = "tp"\n', ""), "`axis` is none"),
            (RULE.replace("dim = 0", "dim = true"), "`dim` is not a dimension"),
            (RULE.replace("dim = 0", "dim = 99"), "`dim` is not a dimension"),
            (RULE.replace("dim = 0", ""), "`dim` is not a dimension"),
            (RULE.replace('["a.weight"]', "[]"), "`tensors` is missing or empty"),
            (RULE.replace('["a.weight"]', '"a.weight"'), "`tensors` is not a list of texts"),
            (RULE.replace("a.weight", "a.[weight"), "bad pattern `a.[weight`"),
            (RULE.replace("a.weight", "{layer}.weight"), "bad pattern `{layer}.weight`"),
            (RULE + "sections = []", "`sections` is not a list of relative lengths"),
            (RULE + "sections = [1]", "`sections` is not a list of relative lengths"),
            (RULE + "sections = [1, 0]", "`sections` is not a list of relative lengths"),
            (RULE + 'sections = ["heads", "tails"]', "`sections` is not a list of relative lengths"),
            (RULE + 'sections = [1, "heads"]', "they cannot be compared"),
            (RULE + 'units = "pairs"', "unknown `units`"),
            (RULE + "units = [1]", "unknown `units`"),
            ("include = ['nothing']", "no built-in set of rules is called `nothing`"),
            ("[stages]\nlayers = ['layers.*']", "bad pattern `layers.*`"),
            ("[stages]\nmiddle = []", "[stages]: unknown key `middle`"),
            ("[stages]\ntied = [['a']]", "`tied` is not a list of pairs"),
            ("stages = 1", "`stages` is not a table"),
            ("[experts]\nnames = ['{layer}']", "bad pattern `{layer}`"),
            ("shaped = [{tensor = 'a'}]", "`shaped` is not a list of proportions"),
            ("shaped = [{tensor = 'a', dim = true, times = 1, of = 'b', of_dim = 0}]", "`shaped` has names and numbers"),
            ("recognise = ['a']", "`recognise` is not a list of lists"),
            ("about = 1", "`about` is not a text"),
            ("replicate = [1]", "`replicate` is not a list of texts"),
        ],
    )
    def test_what_is_wrong_is_told_with_its_place(self, text: str, said: str) -> None:
        with pytest.raises(UsageError) as told:
            parse_rules(text, "mine.toml")
        assert said in told.value.message
        assert "mine.toml" in told.value.message + told.value.where

    @pytest.mark.parametrize("name", BUILT_IN + OTHERS)
    def test_printed_rules_are_read_back(self, name: str) -> None:
        rules = built_in(name)
        again = parse_rules(render_rules(rules), name)

        def told(rule: Rule) -> tuple[object, ...]:
            return rule.tensors, rule.axis, rule.dim, rule.sections, rule.units

        cutting = [told(rule) for rule in rules.rules if rule.axis]
        assert [told(rule) for rule in again.rules if rule.axis] == cutting
        assert (again.stages, again.experts) == (rules.stages, rules.experts)

    @given(st.text(max_size=40))
    def test_any_text_is_rules_or_an_error(self, text: str) -> None:
        try:
            parse_rules(text, "mine.toml")
        except UsageError:
            return


class TestChoice:
    @pytest.mark.parametrize(
        ("names", "chosen"),
        [
            (["model.layers.0.self_attn.q_proj.weight"], "llama"),
            (["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"], "llama"),
            (["_orig_mod.model.layers.0.self_attn.qkv_proj.weight"], "llama"),
            (["layers.0.attention.wq.weight"], "llama"),
            (["model.layers.0.block_sparse_moe.experts.7.w1.weight", "model.layers.0.self_attn.q_proj.weight"], "mixtral"),
            (["model.layers.0.mlp.experts.gate_up_proj"], "mixtral"),
            (["model.layers.0.self_attn.W_pack.weight"], "llama"),
            (["layers.0.moe.experts.w1"], "mixtral"),
            (["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj_bias"], "gpt_oss"),
            (["h.0.self_attention.query_key_value.weight", "word_embeddings_layernorm.weight"], "bloom"),
            (["gpt_neox.layers.0.attention.query_key_value.weight", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"], "gpt_neox"),
            (["encoder.block.0.layer.0.SelfAttention.q.weight"], "t5"),
            (["transformer.h.0.self_attention.query_key_value.weight", "transformer.h.0.mlp.dense_h_to_4h.weight"], "falcon"),
            (["transformer.encoder.layers.0.self_attention.query_key_value.weight", "x.mlp.dense_h_to_4h.weight"], "chatglm"),
            (
                [
                    *("transformer.layers.0.attention.query_key_value.weight", "transformer.layers.0.mlp.dense_h_to_4h.weight"),
                    "transformer.word_embeddings.weight",
                ],
                "chatglm1",
            ),
            (["model.layers.0.attention.wqkv.weight", "model.layers.0.feed_forward.w1.weight"], "internlm2"),
            (["transformer.h.0.attn.q_proj.weight", "transformer.h.0.mlp.fc_in.weight"], "gptj"),
            (["3.self_attention.query_key_value.weight", "3.mlp.dense_h_to_4h.weight"], "megatron"),
            (["language_model.encoder.layers.0.self_attention.query_key_value.weight", "a.mlp.dense_h_to_4h.weight"], "megatron"),
        ],
    )
    def test_the_set_is_chosen_by_the_names(self, names: list[str], chosen: str) -> None:
        found = choose(dict.fromkeys(names, ()))
        assert found is not None
        assert found.name == chosen

    @pytest.mark.parametrize(
        "names",
        [
            [],
            ["w"],
            ["transformer.blocks.0.attn.Wqkv.weight", "transformer.blocks.0.ffn.up_proj.weight"],  # MPT
        ],
    )
    def test_names_that_no_set_knows_choose_none(self, names: list[str]) -> None:
        assert choose(dict.fromkeys(names, ())) is None

    @pytest.mark.parametrize(("rows", "chosen"), [(96, "megatron_gated"), (48, "megatron")])
    @pytest.mark.parametrize("layers", [(), (4,)])
    def test_gated_layers_are_told_by_their_shapes(self, rows: int, chosen: str, layers: tuple[int, ...]) -> None:
        number = "" if layers else "3."
        found = choose(
            {
                f"decoder.layers.{number}self_attention.linear_qkv.weight": (*layers, 32, 16),
                f"decoder.layers.{number}mlp.linear_fc1.weight": (*layers, rows, 16),
                f"decoder.layers.{number}mlp.linear_fc2.weight": (*layers, 16, 48),
            }
        )
        assert found is not None
        assert found.name == chosen

    @pytest.mark.parametrize(
        ("shapes", "chosen"),
        [
            ({"h.0.attn.c_attn.weight": (16, 48)}, "gpt2"),
            ({"h.0.attn.c_attn.weight": (48, 16)}, "gpt2_linear"),
            ({"h.0.attn.c_attn.weight": (24, 16)}, "gpt_bigcode"),  # one head of keys and values for all queries
            ({"layers.0.mlp.experts.gate_up_proj": (4, 24, 16), "layers.0.mlp.experts.down_proj": (4, 16, 12)}, "mixtral"),
            (
                {"layers.0.mlp.experts.gate_up_proj": (4, 16, 24), "layers.0.mlp.experts.down_proj": (4, 12, 16)},
                "mixtral_transposed",
            ),
        ],
    )
    def test_layouts_that_share_names_are_told_by_their_shapes(
        self, shapes: dict[str, tuple[int, ...]], chosen: str | None
    ) -> None:
        found = choose(shapes)
        assert (found.name if found else None) == chosen

    def test_the_models_type_decides_between_sets_for_the_same_names(self) -> None:
        shapes = {"h.0.attn.c_attn.weight": (48, 16)}
        named = {kind: found.name for kind in ("gpt_bigcode", "gpt2", "") if (found := choose(shapes, kind)) is not None}
        assert {"gpt_bigcode": "gpt_bigcode", "gpt2": "gpt2_linear", "": "gpt2_linear"} == named

    def test_a_models_type_does_not_choose_a_set_for_other_names(self) -> None:
        found = choose({"model.layers.0.self_attn.q_proj.weight": (8, 8)}, "falcon")
        assert found is not None
        assert found.name == "llama"

    def test_llama_1_and_2_as_meta_cut_them_are_asked_for_by_name(self) -> None:
        first, *_ = built_in("llama_meta1").matching("tok_embeddings.weight")
        assert first.dim == 1
