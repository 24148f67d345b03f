"""The comparison, against a vLLM that a test writes: which requests it sends, and what it says of the answers."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvtier.core.requests.verify_salts import (
    MAX_OWN_SALT_CHARS,
    Verification,
    new_reference_salt,
    new_restored_salt,
    verification_of,
)
from kvtier.errors import RenderError
from kvtier.verification import (
    Comparison,
    ComparisonVerdict,
    Completion,
    compare_live,
    completion_body,
    read_completion,
)

TOKENS = list(range(100))
LOGPROBS: tuple[Mapping[str, float], ...] = ({"a": -0.1, "b": -3.0}, {"c": -0.2, "d": -2.0})
EQUAL, DIFFERENT, INCONCLUSIVE = ComparisonVerdict.EQUAL, ComparisonVerdict.DIFFERENT, ComparisonVerdict.INCONCLUSIVE


class Vllm:
    """Answers a restored prompt with `restored`, any other with `reference`; has a prefix cache by salt."""

    def __init__(self, restored: Completion, reference: Completion | None = None) -> None:
        self._restored, self._reference = restored, reference or restored
        self.asked: list[tuple[int, str, int]] = []

    def __call__(self, *, model: str, tokens: Sequence[int], cache_salt: str, max_tokens: int) -> Completion:
        assert model == "m"
        self.asked.append((len(tokens), cache_salt, max_tokens))
        verification = verification_of(cache_salt)
        assert verification is not None
        return self._restored if verification.own_salt is not None else self._reference


def completion(
    logprobs: Sequence[Mapping[str, float]] = LOGPROBS, tokens: str = "ac", cached_tokens: int | None = 96
) -> Completion:
    return Completion(tokens=tuple(tokens), logprobs=tuple(logprobs), cached_tokens=cached_tokens)


def compare(restored: Completion, reference: Completion | None = None) -> Comparison:
    return compare_live(Vllm(restored, reference), model="m", tokens=TOKENS)


def test_both_have_the_same_number_of_cached_tokens_under_salts_that_are_used_once() -> None:
    vllm = Vllm(completion())
    found = compare_live(vllm, model="m", tokens=TOKENS, own_salt="s", max_tokens=3)
    assert (found.verdict, found.max_difference, found.same_tokens, found.why) == (EQUAL, 0.0, True, "")
    assert (found.restored_tokens, found.reference_tokens) == (96, 96)
    sizes = [(num_tokens, max_tokens) for num_tokens, _, max_tokens in vllm.asked]
    assert sizes == [(100, 3), (97, 1), (100, 3)]
    salts = [verification_of(salt) for _, salt, _ in vllm.asked]
    assert salts == [Verification("s"), Verification(None), Verification(None)]
    assert vllm.asked[1][1] == vllm.asked[2][1], "what the second computed, the third finds"


@pytest.mark.parametrize(
    ("reference", "verdict", "difference"),
    [
        (completion([{"a": -0.1005, "b": -3.0}, LOGPROBS[1]]), EQUAL, 0.0005),
        (completion([{"a": -0.2, "b": -3.0}, LOGPROBS[1]]), DIFFERENT, 0.1),
        (completion([LOGPROBS[0], {"c": -0.2, "d": -2.5}]), DIFFERENT, 0.5),
        (completion([{"a": -0.1, "x": -3.0}, LOGPROBS[1]]), EQUAL, 0.0),  # two of one rank change places
        (completion([{"a": -0.1, "x": -2.0}, LOGPROBS[1]]), DIFFERENT, 1.0),
        (completion([{"a": math.nan, "b": -3.0}, LOGPROBS[1]]), DIFFERENT, math.nan),
    ],
)
def test_logprobs_decide_within_the_tolerance(
    reference: Completion, verdict: ComparisonVerdict, difference: float
) -> None:
    found = compare(completion(), reference)
    assert found.verdict is verdict
    assert found.max_difference == pytest.approx(difference, nan_ok=True)


def test_another_token_is_another_answer_and_what_follows_it_is_not_compared() -> None:
    found = compare(completion(), completion([LOGPROBS[0], {"z": -9.0}], tokens="xc"))
    assert (found.verdict, found.same_tokens, found.max_difference) == (DIFFERENT, False, 0.0)
    assert "token 1" in found.why


@pytest.mark.parametrize(
    ("restored", "reference", "why"),
    [
        (completion(cached_tokens=None), None, "--enable-prompt-tokens-details"),
        (completion(cached_tokens=0), None, "restored nothing"),
        (completion(), completion(cached_tokens=80), "96 tokens.* 80"),
        (completion([], ""), completion([], ""), "no token"),
    ],
)
def test_what_cannot_be_compared_is_inconclusive(restored: Completion, reference: Completion | None, why: str) -> None:
    found = compare(restored, reference)
    assert found.verdict is INCONCLUSIVE
    assert found.max_difference is None
    assert re.search(why, found.why)


def shifted(by: float) -> Completion:
    return completion([{"a": -0.1 - by, "b": -3.0}, LOGPROBS[1]])


class NoisyVllm:
    """Its answers to restored prompts, and to others, differ by these."""

    def __init__(self, restored: Sequence[float], own: Sequence[float]) -> None:
        self.restored, self.own = list(restored), list(own)
        self.salts: dict[str, list[int]] = {}

    def __call__(self, *, model: str, tokens: Sequence[int], cache_salt: str, max_tokens: int) -> Completion:
        verification = verification_of(cache_salt)
        assert verification is not None
        lengths = self.salts.setdefault(cache_salt, [])
        lengths.append(len(tokens))
        if verification.own_salt is not None:
            assert len(lengths) == 1, "vLLM's prefix cache would have it"
            return shifted(self.restored.pop(0))
        return shifted(self.own.pop(0) if len(tokens) == len(TOKENS) else 9.0)


@pytest.mark.parametrize(("restored", "own"), [([0.05, 0.0], [0.0, 0.0]), ([0.05, 0.05], [0.0, 0.05]), ([0.0], [0.0])])
def test_two_equal_answers_end_it(restored: list[float], own: list[float]) -> None:
    """Beside other requests vLLM's own answers differ now and then."""
    vllm = NoisyVllm([*restored, 7.0], [*own, 8.0])
    assert compare_live(vllm, model="m", tokens=TOKENS).verdict is EQUAL
    assert len(vllm.own) == len(vllm.restored) == 1


@pytest.mark.parametrize(
    ("difference", "verdict"), [(0.05, EQUAL), (0.1, INCONCLUSIVE), (0.13, DIFFERENT), (0.5, DIFFERENT)]
)
def test_a_difference_is_weighed_against_those_of_vllms_own_answers(
    difference: float, verdict: ComparisonVerdict
) -> None:
    """KV that was computed beside other requests is right, and rounded otherwise."""
    own = [0.0, 0.02, 0.0, 0.03, 0.0, 0.01]
    vllm = NoisyVllm([difference] * 6, own)
    found = compare_live(vllm, model="m", tokens=TOKENS)
    assert found.verdict is verdict, found
    assert found.max_difference == pytest.approx(difference - 0.03)
    pieces = [lengths for salt, lengths in vllm.salts.items() if "reference" in salt]
    assert pieces[0] == [97, 100]
    assert pieces[1:] == [[16 * attempt, 97, 100] for attempt in range(1, 6)], "each time in other pieces"


def test_one_kind_of_answer_that_differs_is_different() -> None:
    assert compare_live(NoisyVllm([0.002] * 6, [0.0] * 6), model="m", tokens=TOKENS).verdict is DIFFERENT


def test_a_salt_that_is_too_long_is_inconclusive() -> None:
    found = compare_live(Vllm(completion()), model="m", tokens=TOKENS, own_salt="s" * (MAX_OWN_SALT_CHARS + 1))
    assert found.verdict is INCONCLUSIVE


@pytest.mark.parametrize("own_salt", ["", "s", "a:b", "kvtier-verify-0123456789abcdef:x", "ü\n"])
def test_a_salt_says_what_it_asks_for(own_salt: str) -> None:
    assert verification_of(new_restored_salt(own_salt)) == Verification(own_salt)
    assert new_restored_salt(own_salt) != new_restored_salt(own_salt)
    assert verification_of(new_reference_salt()) == Verification(None)
    assert len(new_restored_salt("s" * MAX_OWN_SALT_CHARS)) <= 128
    assert not set("/@\\\0") & set(new_restored_salt(""))


@pytest.mark.parametrize(
    "salt",
    [
        None,
        "",
        "tenant",
        "kvtier-verify-",
        "kvtier-verify-0123456789abcde:",
        "kvtier-reference-0123456789abcdef:x",
        "xkvtier-verify-0123456789abcdef:",
        "kvtier-verify-0123456789ABCDEF:",
    ],
)
def test_other_salts_are_those_of_users(salt: str | None) -> None:
    assert verification_of(salt) is None


def test_an_answer_is_read() -> None:
    logprobs = {"tokens": ["token_id:5"], "top_logprobs": [{"token_id:5": -0.5, "token_id:7": -2}]}
    answer: dict[str, Any] = {
        "choices": [{"logprobs": logprobs}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
    }
    found = read_completion(answer)
    assert (found.tokens, found.cached_tokens) == (("token_id:5",), 3)
    assert found.logprobs == ({"token_id:5": -0.5, "token_id:7": -2.0},)
    assert read_completion(answer | {"usage": {}}).cached_tokens is None
    assert completion_body(model="m", tokens=(1, 2), cache_salt="s", max_tokens=1)["prompt"] == [1, 2]


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{"logprobs": None}], "usage": {}}, {"choices": 1}]
)
def test_what_is_no_completion_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(RenderError):
        read_completion(answer)
