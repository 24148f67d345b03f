"""`Client.explain`, `explain_request` and `recent_requests` against fakes, and the text around a difference."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvtier import Client
from kvtier._pb import engine_pb2
from kvtier.errors import InvalidArgumentError, RenderError, RequestNotFoundError
from kvtier.library.flows.explaining import WINDOW_TOKENS, difference_of, tokens_of_request
from kvtier.library.rendering.vllm_client import VllmClient
from kvtier.library.values.outcome_values import ChangeLooksLike, Difference, RequestOutcome
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.fake_vllm import FakeVllm, decode, plain_template

SYSTEM = "You are a parrot. Today is 2026-07-01. Be brief, and repeat what users say to you."
TURNS = [{"role": "user", "content": "Hello!"}]


class ByteVllm(VllmClient):
    """A vLLM with a token for each byte: a character may be several, and a window may cut one."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")

    def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.fixture
def bytes_vllm() -> Iterator[VllmClient]:
    with ByteVllm() as vllm:
        yield vllm


def difference(vllm: VllmClient, requested: str, pinned: str) -> Difference:
    """Return the difference of two texts from their first different byte on."""
    one, other = requested.encode(), pinned.encode()
    differs_at = next(index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    found = difference_of("bot", one, other, differs_at, "toy", vllm)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("requested", "pinned", "looks_like"),
    [
        ("Today is 2026-07-01.", "Today is 2026-07-02.", ChangeLooksLike.DATE),
        ("Today is 2026-07-01.", "Today is 2025-01-12.", ChangeLooksLike.DATE),
        ("It is 7/1/2026 now", "It is 8/1/2026 now", ChangeLooksLike.DATE),
        ("It is 01.07.2026 now", "It is 02.07.2026 now", ChangeLooksLike.DATE),
        ("It is July 1, 2026 now", "It is July 2, 2026 now", ChangeLooksLike.DATE),
        ("It is July 1, 2026 now", "It is June 1, 2026 now", ChangeLooksLike.DATE),
        ("On 1 July 2026 we", "On 1 July 2027 we", ChangeLooksLike.DATE),
        ("the 3rd of May is", "the 4th of May is", ChangeLooksLike.DATE),
        ("It is Monday, so", "It is Tuesday, so", ChangeLooksLike.DATE),
        ("Now is 10:11.", "Now is 10:12.", ChangeLooksLike.TIME),
        ("at 2026-07-01T10:11:12Z", "at 2026-07-01T10:11:13Z", ChangeLooksLike.TIME),
        ("id 3f2a7b1c-11aa-4b2c-9d3e-aa", "id 3f2a7b1d-11aa-4b2c-9d3e-aa", ChangeLooksLike.ID),
        ("session 0123456789abcdef go", "session f123456789abcdef go", ChangeLooksLike.ID),
        ("You serve 12 users", "You serve 13 users", ChangeLooksLike.NUMBER),
        ("You serve 12 users", "You serve 123 users", ChangeLooksLike.NUMBER),
        ("It costs 1,200.50", "It costs 1,300.50", ChangeLooksLike.NUMBER),
        ("Dear Bob, 5 of", "Dear Ann, 5 of", ChangeLooksLike.TEXT),
        ("v2.Bob", "v2.Ann", ChangeLooksLike.TEXT),
        ("On 2026-07-01 Bob said", "On 2026-07-01 Ann said", ChangeLooksLike.TEXT),
        ("Today is 2026-07-01.", "Today is Bob's day.", ChangeLooksLike.TEXT),
    ],
)
def test_what_a_change_looks_like(
    bytes_vllm: VllmClient, requested: str, pinned: str, looks_like: ChangeLooksLike
) -> None:
    """The last one is a date on one side only: it does not change from request to request."""
    assert difference(bytes_vllm, requested, pinned).looks_like is looks_like
    assert difference(bytes_vllm, pinned, requested).looks_like is looks_like


def test_a_difference_within_a_word(bytes_vllm: VllmClient) -> None:
    found = difference(bytes_vllm, "a parrot is", "a parson is")
    assert (found.before, found.in_request, found.in_prompt) == ("a par", "rot is", "son is")


def test_a_difference_at_the_first_token(bytes_vllm: VllmClient) -> None:
    found = difference(bytes_vllm, "Ann", "Bob")
    assert (found.before, found.in_request, found.in_prompt) == ("", "Ann", "Bob")


def test_a_window_shows_a_few_tokens_on_each_side(bytes_vllm: VllmClient) -> None:
    found = difference(bytes_vllm, f"{'a' * 50}{'x' * 50}", f"{'a' * 50}{'y' * 50}")
    assert (found.before, found.in_request) == ("a" * WINDOW_TOKENS, "x" * WINDOW_TOKENS)


@pytest.mark.parametrize("padding", range(4))
def test_characters_whose_bytes_are_on_both_sides(bytes_vllm: VllmClient, padding: int) -> None:
    """é and è begin with the same byte; and the window's ends lie within characters of three bytes."""
    requested, pinned = f"{'€' * 9}{'a' * padding}é{'€' * 9}", f"{'€' * 9}{'a' * padding}è{'€' * 9}"
    found = difference(bytes_vllm, requested, pinned)
    assert (found.in_request.rstrip("€"), found.in_prompt.rstrip("€")) == ("é", "è")
    assert found.before.lstrip("€") == "a" * padding
    assert "\ufffd" not in found.before + found.in_request + found.in_prompt


def test_without_a_vllm_that_can_say_there_is_no_text(vllm: FakeVllm) -> None:
    vllm.statuses["/detokenize"] = 500
    with VllmClient(vllm.url) as client:
        assert difference_of("bot", [1, 2], [1, 3], 1, "toy", client) is None


# Client


@pytest.fixture
def bot(kvtier: Client) -> Client:
    """Have a durable prompt."""
    kvtier.pin("bot", system=SYSTEM)
    return kvtier


def chat(system: str, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "system", "content": system}, *TURNS], **fields}


def test_a_chat_whose_date_has_changed(bot: Client) -> None:
    explained = bot.explain(chat(SYSTEM.replace("07-01", "07-02")))
    found, (near, *_) = explained.difference, explained.explanation.prompts
    assert explained.explanation.outcome is RequestOutcome.DIVERGED
    assert near.differs_at == len("[system]\n") + SYSTEM.index("1.")
    assert found is not None
    assert (found.name, found.looks_like) == ("bot", ChangeLooksLike.DATE)
    assert found.before.endswith("is 2026-07-0")
    assert (found.in_request[:2], found.in_prompt[:2]) == ("2.", "1.")


def test_a_chat_that_hits_differs_from_nothing(bot: Client) -> None:
    bot.pin("longer", system=f"{SYSTEM} And sing.")
    explained = bot.explain(chat(SYSTEM))
    assert explained.explanation.outcome is RequestOutcome.HIT
    assert explained.num_tokens > len(SYSTEM)
    assert any(each.differs_at for each in explained.explanation.prompts)
    assert explained.difference is None


def test_text_tokens_and_token_prompts(bot: Client, vllm: FakeVllm) -> None:
    pinned = bot.tokens("bot")
    for explained in (
        bot.explain({"prompt": [*pinned, 1]}),
        bot.explain(tokens=iter([*pinned, 1])),
        bot.explain({"prompt": f"[system]\n{SYSTEM}\n[user]\n!"}),
    ):
        assert explained.explanation.outcome is RequestOutcome.HIT
    assert bot.explain({"prompt": "!" * 100}).explanation.outcome is RequestOutcome.UNKNOWN
    assert bot.explain({"prompt": "!"}).explanation.outcome is RequestOutcome.TOO_SHORT
    assert all(path != "/v1/completions" for path, _ in vllm.requests[-2:]), "it computes nothing"


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({}, ""),
        ({"reasoning_effort": "none"}, "/no_think"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "/no_think"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "high"),
        ({"reasoning_effort": None, "chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
    ],
)
def test_how_much_to_reason_is_rendered_as_vllm_does(vllm: FakeVllm, fields: dict[str, Any], beginning: str) -> None:
    """Without it another prompt was explained than vLLM computes."""

    def template(
        messages: list[dict[str, Any]], tools: list[Any], enable_thinking: bool = True, reasoning_effort: str = ""
    ) -> str:
        return (reasoning_effort if enable_thinking else "/no_think") + plain_template(messages, tools)

    vllm.template = template
    with VllmClient(vllm.url) as client:
        _, tokens = tokens_of_request(chat(SYSTEM, **fields), client)
    assert decode(list(tokens)).startswith(f"{beginning}[system]")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"messages": TURNS, "system": SYSTEM}, "system"),
        ({"messages": TURNS, "system": [{"type": "text", "text": SYSTEM}]}, "system"),
        ({"input": "Hello!", "instructions": SYSTEM}, "input"),
        ({"prompt": {"id": "pmpt_1"}, "instructions": SYSTEM}, "instructions"),
    ],
)
def test_a_request_of_another_api_is_refused(kvtier: Client, request_: dict[str, Any], field: str) -> None:
    """Without its system prompt another prompt was explained than vLLM computes."""
    with pytest.raises(InvalidArgumentError, match=r"is a field of /v1/.* as a chat") as caught:
        kvtier.explain(request_)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "request"),
        ({"prompt": ["two", "prompts"]}, "request"),
        ({"prompt": [[1, 2], [3]]}, "request"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"messages": "no list"}, "messages"),
        (chat(SYSTEM, tools="no list"), "tools"),
        (chat(SYSTEM, chat_template_kwargs="no object"), "chat_template_kwargs"),
    ],
)
def test_what_is_no_request(kvtier: Client, request_: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        kvtier.explain(request_)
    assert caught.value.field.startswith(field)


def test_either_a_request_or_tokens(kvtier: Client) -> None:
    with pytest.raises(InvalidArgumentError):
        kvtier.explain()
    with pytest.raises(InvalidArgumentError):
        kvtier.explain({"prompt": [1]}, tokens=[1])


def test_a_request_that_vllm_refuses(kvtier: Client, vllm: FakeVllm) -> None:
    vllm.statuses["/tokenize"] = 400
    with pytest.raises(RenderError):
        kvtier.explain(chat(SYSTEM))


def test_requests_that_ended(bot: Client, daemon: FakeCacheService) -> None:
    pin_id = bot.get("bot").pin_id
    for number, outcome in enumerate((engine_pb2.HIT, engine_pb2.DIVERGED, engine_pb2.UNKNOWN)):
        daemon.report(
            engine_pb2.RequestEnded(
                request_id=f"chatcmpl-{number}",
                outcome=outcome,
                pin_id=pin_id if outcome != engine_pb2.UNKNOWN else "",
                prompt_tokens=90,
                shared_tokens=32,
            )
        )
    assert [each.request_id for each in bot.recent_requests()] == ["chatcmpl-2", "chatcmpl-1", "chatcmpl-0"]
    (hit,) = bot.recent_requests(outcomes=[RequestOutcome.HIT])
    assert (hit.request_id, hit.outcome, hit.pin_name) == ("chatcmpl-0", RequestOutcome.HIT, "bot")
    (miss,) = bot.recent_requests(misses_only=True)
    assert miss.outcome is RequestOutcome.DIVERGED
    assert len(bot.recent_requests(limit=1)) == 1
    with pytest.raises(InvalidArgumentError, match="unrecognized"):
        bot.recent_requests(outcomes=[RequestOutcome.UNRECOGNIZED])
    for request_id in ("chatcmpl-1", "1"):
        explained = bot.explain_request(request_id)
        request = explained.explanation.request
        assert request is not None
        assert (request.request_id, explained.num_tokens) == ("chatcmpl-1", 0)
        assert explained.explanation.outcome is RequestOutcome.DIVERGED
    with pytest.raises(RequestNotFoundError):
        bot.explain_request("none")
