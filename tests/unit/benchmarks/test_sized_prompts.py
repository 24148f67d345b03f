"""A system prompt has as many tokens as was wanted, and shares none of its first words with another one."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.harness.tokenizer import write_tokenizer
from benchmarks.measuring.sized_prompts import make_prompt
from benchmarks.suite.matrix import FLOOD_VARIANT

FIRST_WORDS = 32  # the smallest block that engines here are run with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path, 2048)
    return path


@pytest.mark.parametrize("tokens", [500, 8000])
def test_a_prompt_has_the_wanted_length(model: Path, tokens: int) -> None:
    prompt = make_prompt(model, tokens, 3)
    found = len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt.text).ids)
    assert found == pytest.approx(tokens, abs=4)


def test_no_two_prompts_begin_alike(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    variants = [*range(12), *range(FLOOD_VARIANT, FLOOD_VARIANT + 12)]
    firsts = {tuple(tokenizer.encode(make_prompt(model, 500, each).text).ids[:FIRST_WORDS]) for each in variants}
    assert len(firsts) == len(variants)
