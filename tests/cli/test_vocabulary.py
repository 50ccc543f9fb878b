"""What `--names` says of the rows that pad a vocabulary: which are cut off, or that nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Answer
from tests.fixture_cases import FIXTURES

Run = Callable[..., Answer]
SOURCE = FIXTURES / "megatron" / "tdist_tp2_model_only" / "ckpt"


def test_a_vocabulary_of_unknown_size_keeps_its_rows_and_says_so(ckpttools: Run, tmp_path: Path) -> None:
    document = ckpttools("consolidate", SOURCE, tmp_path / "out", "--names", "hf", "--weights-only", "--json").document
    kept = [note for note in document["notes"] if note.startswith("kept: all 96 rows of embedding.word_embeddings.weight")]
    assert len(kept) == 1
    assert "--setting vocab_size=N" in kept[0]


def test_rows_beyond_a_vocabulary_of_known_size_are_cut_off(ckpttools: Run, tmp_path: Path) -> None:
    arguments = ["--names", "hf", "--weights-only", "--setting", "vocab_size=90", "--json"]
    document = ckpttools("consolidate", SOURCE, tmp_path / "out", *arguments).document
    assert not [note for note in document["notes"] if note.startswith("kept:")]
    assert [note for note in document["notes"] if "rows [90, 96) of embedding.word_embeddings.weight" in note]
    shapes = {t["name"]: t["shape"] for t in ckpttools("hash", tmp_path / "out", "--json").document["tensors"]}
    assert shapes["model.embed_tokens.weight"][0] == shapes["lm_head.weight"][0] == 90
