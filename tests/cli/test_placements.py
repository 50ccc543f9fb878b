"""What `reshard` does with rules: built-in, from a file, from how the source was cut; and what it refuses, leaving nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]
SOURCE = FIXTURES / "torch" / "dcp_fsdp2_tp_2x2" / "ckpt"


def reshard(ckpttools: Run, tmp_path: Path, mesh: str, *options: object, source: Path = SOURCE) -> Answer:
    return ckpttools("reshard", source, tmp_path / "out", "--to", "dcp", "--mesh", mesh, *options)


def reasons(answer: Answer) -> dict[str, str]:
    return {placed["tensor"]: placed["reason"] for placed in answer.document["placements"]}


def test_rules_are_chosen_by_the_names(ckpttools: Run, tmp_path: Path) -> None:
    told = reasons(reshard(ckpttools, tmp_path, "tp=2", "--dry-run", "--json"))
    assert told["model.layers.0.attention.wo.weight"] == "tp dim 1 by rule 5 of llama"


def test_rules_of_the_source_are_found(ckpttools: Run, tmp_path: Path) -> None:
    told = reasons(reshard(ckpttools, tmp_path, "tp=4", "--placements", "source", "--dry-run", "--json"))
    assert told["model.layers.0.attention.wo.weight"].endswith("of source")
    assert told["model.norm.weight"] == "no rule: replicated on tp"


def test_rules_of_the_source_are_printed_and_can_be_given_again(ckpttools: Run, tmp_path: Path) -> None:
    answer = reshard(ckpttools, tmp_path, "tp=4", "--placements", "source", "--dry-run", "--json")
    rules = tmp_path / "found.toml"
    rules.write_text(answer.document["rules_toml"])
    again = reshard(ckpttools, tmp_path, "tp=4", "--placements", rules, "--dry-run", "--json")
    told = [[placed["placement"] for placed in each.document["placements"]] for each in (answer, again)]
    assert told[0] == told[1]
    assert answer.document["rules_toml"] in reshard(ckpttools, tmp_path, "tp=4", "--placements", "source", "--dry-run").stdout


def test_rules_of_a_file_are_taken(ckpttools: Run, tmp_path: Path) -> None:
    rules = tmp_path / "mine.toml"
    rules.write_text('[[rules]]\ntensors = ["wo.weight"]\naxis = "tp"\ndim = 0\n')
    told = reasons(reshard(ckpttools, tmp_path, "tp=2", "--placements", rules, "--dry-run", "--json"))
    assert told["model.layers.0.attention.wo.weight"] == f"tp dim 0 by rule 1 of {rules}"
    assert told["model.layers.0.attention.wq.weight"] == "no rule: replicated on tp"


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        ("tp=3,fsdp=2", (), "--mesh fsdp=3,tp=2"),
        ("pp=3", (), "pp=3 is more than there are layers"),
        ("ep=2", (), "no rule says which tensors are experts"),
        ("cp=2", (), "unknown mesh axis `cp`"),
        ("tp=2", ("--placements", "nothing"), "no built-in set"),
        ("tp=2", ("--placements", "gpt2"), "no rule cuts a tensor of these names along tp"),
        ("pp=2", ("--pp-layers", "3,4"), "the layers per stage do not fit"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    ckpttools: Run, tmp_path: Path, mesh: str, options: tuple[str, ...], said: str
) -> None:
    answer = reshard(ckpttools, tmp_path, mesh, *options)
    assert answer.exit_code == 2
    assert said in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_heads_of_the_config_are_kept_whole(ckpttools: Run, tmp_path: Path) -> None:
    config = tmp_path / "params.json"
    config.write_text(json.dumps({"dim": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}))
    answer = reshard(ckpttools, tmp_path, "tp=4", "--model-config", config)
    assert answer.exit_code == 2
    assert "2 key/value heads cannot be divided evenly among tp=4" in answer.stderr
    assert "`model.layers.*.attention.wk.weight`" in answer.stderr
    assert "--mesh tp=2" in answer.stderr
    assert not (tmp_path / "out").exists()


def test_a_source_in_one_piece_tells_no_rules(ckpttools: Run, tmp_path: Path) -> None:
    source = FIXTURES / "torch" / "dcp_pp2_plain" / "ckpt"
    answer = reshard(ckpttools, tmp_path, "tp=2", "--placements", "source", source=source)
    assert answer.exit_code == 2
    assert "every tensor of it is in one piece" in answer.stderr


def test_a_strange_config_beside_the_source_does_not_matter(ckpttools: Run, tmp_path: Path) -> None:
    import shutil

    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    (source / "config.json").write_text('{"num_attention_heads": "many"}')
    assert reshard(ckpttools, tmp_path, "tp=2", "--dry-run", "--json", source=source).exit_code == 0


def test_metas_own_files_of_a_small_vocabulary_have_columns_of_the_embedding(ckpttools: Run, tmp_path: Path) -> None:
    options = ("--weights-only", "--exclude", "model.freqs_cis", "--exclude", "model.num_updates", "--strip-prefix", "model.")
    answer = ckpttools("reshard", SOURCE, tmp_path / "out", "--to", "llama", "--mesh", "tp=2", *options, "--dry-run", "--json")
    assert reasons(answer)["tok_embeddings.weight"] == "tp dim 1 by rule 1 of llama_meta1"
    answer = ckpttools("reshard", SOURCE, tmp_path / "out", "--to", "llama", "--mesh", "tp=2", *options, "--placements", "llama",
                       "--dry-run", "--json")  # fmt: skip
    assert reasons(answer)["tok_embeddings.weight"].startswith("tp dim 0")
