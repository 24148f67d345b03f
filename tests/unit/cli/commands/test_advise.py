"""`kvtier advise`, and pins that came from requests in `show` and `pin --adopt`."""

import json
import time

import pytest

from kvtier._pb.cache_pb2 import Advice, AdvisedPrefix, ChangingPlace, NamespaceAdvice, PinUse, PromptStatus
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.hostile import HOSTILE


def prefix(verdict: AdvisedPrefix.Verdict, num_tokens: int = 4096, name: str = "") -> AdvisedPrefix:
    return AdvisedPrefix(
        digest=bytes(16),
        num_tokens=num_tokens,
        is_system_prompt=num_tokens == 4096,
        verdict=verdict,
        pin_name=name,
        requests_per_hour=56.04,
        num_prompts=41,
        last_seen_unix_s=time.time() - 30,
        added_tokens=num_tokens,
        added_bytes=22 << 20,
        saved_s_per_hour=63.2,
        saved_share=0.41,
    )


@pytest.fixture
def advice(daemon: FakeCacheService) -> NamespaceAdvice:
    """Let the daemon know of a prompt that is pinned, one that is not worth it, and a place that changes."""
    namespace = NamespaceAdvice(
        namespace_id="a1" * 32,
        model="demo",
        requests_per_hour=120,
        prompt_tokens_per_hour=412_000,
        chosen_bytes=22 << 20,
        saved_s_per_hour=63.2,
        saved_share=0.41,
        prefixes=[
            prefix(AdvisedPrefix.CHOSEN, name="auto-3f2a1b90cd45"),
            prefix(AdvisedPrefix.TOO_FEW_REQUESTS, 2048),
            *([prefix(AdvisedPrefix.ONE_PROMPT, 1024)] * 12),
        ],
        places=[
            ChangingPlace(
                num_stable_tokens=1034,
                num_tokens=4096,
                num_prompts=57,
                before="You answer questions about Acme's products.\nToday is ",
                examples=["2026-11-22. Be brief", "2026-11-23. Be brief"],
                seen_unix_s=time.time(),
            )
        ],
    )
    daemon.advice = Advice(mode="pin", max_bytes=1 << 30, namespaces=[namespace])
    return daemon.advice.namespaces[0]


def test_it_says_what_is_worth_a_pin_and_what_to_change(kvtier: Kvtier, advice: NamespaceAdvice) -> None:
    shown = kvtier("advise")
    assert shown.exit_code == 0, shown.output
    assert max(len(line.rstrip()) for line in shown.stdout.splitlines()) <= 80, shown.stdout
    for text in (
        "120 requests an hour, 412,000 prompt tokens",
        "worth a pin: 1, 22.0 MiB on disk",
        "they save 1m 3s of prefill an hour, 41% of all prompt tokens",
        "auto-3f2a1b90cd45",
        "too few requests",
        "and 3 more that are not worth one",
        "after 1,034 of about 4,096 tokens, 57 different prompts",
        "about Acme's products. Today is",
        "[2026-11-23. Be brief]",
        "up to 1.00 GiB on disk",
    ):
        assert text in " ".join(shown.stdout.split()), (text, shown.stdout)
    assert json.loads(kvtier("advise", "--json").stdout)["namespaces"][0]["prefixes"][0]["verdict"] == "CHOSEN"


def test_a_budget_is_sent_and_checked(kvtier: Kvtier, daemon: FakeCacheService) -> None:
    assert kvtier("advise", "--budget", "2GiB").exit_code == 0
    assert daemon.budgets == [2 << 30]
    for wrong in ("0", "much", "9000000TiB"):
        refused = kvtier("advise", "--budget", wrong)
        assert refused.exit_code == 2
        assert f"--budget = '{wrong}'" in refused.stderr


def test_it_says_why_nothing_is_known(kvtier: Kvtier, daemon: FakeCacheService) -> None:
    assert "Automatic pins are off" in kvtier("advise").stdout
    daemon.advice = Advice(mode="pin")
    assert "No request was seen yet" in kvtier("advise").stdout


def test_what_is_only_observed_is_pinned_by_hand(
    kvtier: Kvtier, daemon: FakeCacheService, advice: NamespaceAdvice
) -> None:
    daemon.advice.mode = "observe"
    del advice.prefixes[:], advice.places[:]
    shown = kvtier("advise").stdout
    assert "worth a pin: none yet" in shown
    assert "Nothing is pinned by itself" in shown


def test_text_of_prompts_cannot_act_on_the_terminal(kvtier: Kvtier, advice: NamespaceAdvice) -> None:
    advice.places[0].before = advice.places[0].examples[0] = HOSTILE
    advice.model = HOSTILE
    shown = kvtier("advise").stdout
    assert "\x1b" not in shown
    assert "\x9b" not in shown


def test_show_says_where_a_pin_comes_from_and_what_it_was_good_for(kvtier: Kvtier, daemon: FakeCacheService) -> None:
    use = PinUse(num_requests=1200, saved_tokens=4_915_200, saved_s=2457.6, last_used_unix_s=time.time() - 120)
    daemon.prompts["auto-1"] = PromptStatus(name="auto-1", pinned=True, origin="auto", use=use, num_tokens=4096)
    shown = " ".join(kvtier("show", "auto-1").stdout.split())
    assert "found in requests; `kvtier pin NAME --adopt` makes it a pin with a name" in shown
    assert "by 1,200 requests, the last 2m ago; 4,915,200 tokens, 2,458 s of prefill" in shown


def test_adopting_needs_no_source_and_no_vllm(kvtier: Kvtier, daemon: FakeCacheService) -> None:
    daemon.prompts["auto-1"] = PromptStatus(name="auto-1", pinned=True, origin="auto")
    done = kvtier("pin", "support", "--adopt", "auto-1", "--ttl", "7d", "--priority", "3")
    assert done.exit_code == 0, done.output
    assert "pinned: support, which was auto-1" in done.stdout
    (request,) = daemon.pins
    assert (request.name, request.adopt, request.ttl_s, request.priority) == ("support", "auto-1", 7 * 86400, 3)


@pytest.mark.parametrize(("options", "public"), [((), True), (("--no-public",), False), (("--public",), True)])
def test_an_adopted_pin_is_public_as_before_or_as_said(
    kvtier: Kvtier, daemon: FakeCacheService, options: tuple[str, ...], public: bool
) -> None:
    daemon.prompts["auto-1"] = PromptStatus(name="auto-1", pinned=True, origin="auto", public=True)
    done = kvtier("pin", "support", "--adopt", "auto-1", *options)
    assert done.exit_code == 0, done.output
    assert daemon.pins[0].public is public


@pytest.mark.parametrize(
    "options", [("--tokens", "x.json"), ("--model", "demo"), ("--cache-salt", "s"), ("--no-warm",), ("--timeout", "5")]
)
def test_what_says_other_content_does_not_go_with_adopt(
    kvtier: Kvtier, daemon: FakeCacheService, options: tuple[str, ...]
) -> None:
    daemon.prompts["auto-1"] = PromptStatus(name="auto-1", pinned=True, origin="auto")
    done = kvtier("pin", "support", "--adopt", "auto-1", *options)
    assert done.exit_code != 0
    assert options[0] in done.output
    assert "does not go with --adopt" in " ".join(done.output.split())
    assert not daemon.pins


@pytest.mark.usefixtures("advice")
def test_with_automatic_pins_off_old_counts_are_no_advice(kvtier: Kvtier, daemon: FakeCacheService) -> None:
    """Saved counts were shown as if requests were counted, and the mode as "observe"."""
    daemon.advice.mode = "off"
    shown = kvtier("advise").stdout
    assert "Automatic pins are off" in shown
    assert "requests an hour" not in shown
