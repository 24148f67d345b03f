"""The corpus, and a few new inputs, read by every target: each is accepted or refused, and nothing else happens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.base import CORPUS, Tally, Target, corpus_of
from tests.fuzz.make_corpus import inputs as made_by_hand
from tests.fuzz.mutation import inputs
from tests.fuzz.targets import TARGETS, target_of

MAX_CORPUS_BYTES = 300_000
NUM_NEW = 40


@pytest.fixture(scope="module", params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    target = target_of(request.param)
    yield target
    target.close()


@pytest.fixture
def tally(target: Target) -> Iterator[Tally]:
    tally = Tally(target, lambda what, data: None)
    yield tally
    assert tally.findings == {}
    assert tally.num_inputs > 0


def test_valid_inputs_and_the_corpus(target: Target, tally: Tally) -> None:
    for data in (*target.seeds(), *(path.read_bytes() for path in corpus_of(target.name))):
        tally.take(data)
    assert tally.refusals["accepted"] > 0


def test_new_inputs(target: Target, tally: Tally) -> None:
    strategy: st.SearchStrategy[bytes] = inputs(target, target.seeds())

    @settings(
        max_examples=NUM_NEW,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(strategy)
    def read(data: bytes) -> None:
        tally.take(data)

    read()


def test_the_corpus_is_small_and_that_of_the_script() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(TARGETS)
    assert sum(path.stat().st_size for path in files) < MAX_CORPUS_BYTES
    by_hand = made_by_hand()
    assert {str(path.relative_to(CORPUS)) for path in files} >= by_hand.keys()
    for name, data in by_hand.items():
        if not name.startswith("codecs/zstd-bomb"):  # by another zstd it may have other bytes
            assert Path(CORPUS / name).read_bytes() == data, name
