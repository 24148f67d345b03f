"""What is worth a pin under a budget, and why the rest is not."""

import gc
import time
from dataclasses import replace
from random import Random

import pytest

from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.discovery.choices import PinCosts, PinnedPrefix, PinRules, PrefixChoice, Selection, Verdict
from kvtier.discovery.seen import PrefixCount, SeenTraffic
from kvtier.discovery.selection import MAX_WANTED, SelectionRun, first_wanted, select
from tests.unit.discovery.requests import digest

RULES = PinRules(min_tokens=1024, min_requests=3, max_bytes=10**9)
COSTS = PinCosts(bytes_per_token=1.0, bytes_per_pin=0.0, prefill_tokens_per_s=1000.0)
NOW_S = 1000.0
HYBRID = replace(COSTS, bytes_per_pin=500.0)


def seen(
    name: str,
    num_tokens: int,
    requests: float,
    parent: str | None = None,
    *,
    system: bool = False,
    prompts: int = 5,
    error: float = 0.0,
    last_s: float = 1000.0,
) -> PrefixCount:
    known_parent = None if parent is None else digest(parent)
    return PrefixCount(digest(name), num_tokens, system, known_parent, requests + error, error, prompts, 1.0, last_s)


def traffic(*prefixes: PrefixCount, tokens: float = 1e6) -> SeenTraffic:
    return SeenTraffic(now_s=NOW_S, prefixes=prefixes, requests=1000.0, skipped=0.0, tokens=tokens, window_s=3600.0)


def pinned(*prefixes: PrefixCount) -> list[PinnedPrefix]:
    return [PinnedPrefix(each.digest, each.num_tokens, each.is_system_prompt, each.parent) for each in prefixes]


def verdicts(selection: Selection) -> dict[str, Verdict]:
    return {choice.digest.decode().rstrip("."): choice.verdict for choice in selection.choices}


def named(selection: Selection, name: str) -> PrefixChoice:
    return next(choice for choice in selection.choices if choice.digest == digest(name))


def chosen(selection: Selection) -> set[str]:
    return {choice.digest.decode().rstrip(".") for choice in selection.chosen}


def test_engines_are_asked_first_for_what_was_seen_last() -> None:
    """Prefixes whose third request was the last were worth more, and kept others from being asked for, for hours."""
    past = [seen(f"past-{number}", 50_000 + number, 3, last_s=0.0) for number in range(MAX_WANTED)]
    live = seen("live", 2048, 3)
    selection = select(traffic(*past, live), (), RULES, COSTS)
    wanted = first_wanted(selection.chosen)
    assert len(wanted) == MAX_WANTED < len(selection.chosen)
    assert wanted[0].digest == live.digest
    worth = [each.saved_s_per_hour for each in wanted[1:]]
    assert worth == sorted(worth, reverse=True), "of those seen at the same time the most valuable first"


def test_each_prefix_that_is_not_chosen_has_a_reason() -> None:
    selection = select(
        traffic(
            seen("good", 4096, 10, system=True),
            seen("short", 512, 99),
            seen("rare", 4096, 2),
            seen("doubtful", 4096, 2, error=50),
            seen("same", 4096, 50, prompts=1),
            seen("huge", 10**9, 5),
        ),
        (),
        RULES,
        COSTS,
    )
    assert verdicts(selection) == {
        "good": Verdict.CHOSEN,
        "short": Verdict.TOO_SHORT,
        "rare": Verdict.TOO_FEW_REQUESTS,
        "doubtful": Verdict.TOO_FEW_REQUESTS,
        "same": Verdict.ONE_PROMPT,
        "huge": Verdict.OVER_BUDGET,
    }


def test_numbers_are_rates_an_hour_and_a_share_of_all_tokens() -> None:
    selection = select(traffic(seen("a", 4000, 50)), (), RULES, COSTS)
    (choice,) = selection.chosen
    assert (choice.requests_per_hour, choice.added_tokens, choice.added_bytes) == (50, 4000, 4000)
    assert choice.saved_s_per_hour == selection.saved_s_per_hour == pytest.approx(200)
    assert choice.saved_share == selection.saved_share == pytest.approx(0.2)
    assert selection.total_bytes == 4000


def test_a_system_prompt_takes_over_the_fixed_lengths_below_it() -> None:
    chain = (
        seen("1k", 1024, 101),
        seen("2k", 2048, 101, "1k"),
        seen("4k", 4096, 100, "2k"),
        seen("system", 5000, 98, "4k", system=True),
    )
    selection = select(traffic(*chain), (), RULES, COSTS)
    assert chosen(selection) == {"system"}
    assert named(selection, "2k").contained_in == digest("system")
    assert named(selection, "system").added_bytes == selection.total_bytes == 5000
    # Requests that left the system prompt early hit what they share with it.
    saved_tokens = 101 * 2048 + 100 * 2048 + 98 * 904
    assert selection.saved_s_per_hour == pytest.approx(saved_tokens / 1000)


def test_a_pin_stays_until_the_longer_one_that_takes_over_its_chunks_is_pinned() -> None:
    shorter, longer = seen("4k", 4096, 100), seen("system", 5000, 98, "4k", system=True)
    selection = select(traffic(shorter, longer), pinned(shorter), RULES, COSTS)
    assert (chosen(selection), selection.superfluous) == ({"4k", "system"}, ())
    selection = select(traffic(shorter, longer), pinned(shorter, longer), RULES, COSTS)
    assert chosen(selection) == {"system"}
    assert [each.digest for each in selection.superfluous] == [shorter.digest]


def test_a_beginning_that_many_prompts_share_is_counted_once() -> None:
    shared = seen("shared", 2048, 90, system=False)
    systems = [seen(f"s{number}", 6000, 30, "shared", system=True) for number in range(3)]
    selection = select(traffic(shared, *systems), (), RULES, COSTS)
    assert chosen(selection) == {"s0", "s1", "s2"}
    assert selection.total_bytes == 2048 + 3 * (6000 - 2048)


def test_a_fixed_length_with_requests_of_its_own_stays_beside_a_longer_one() -> None:
    selection = select(traffic(seen("4k", 4096, 100), seen("8k", 8192, 60, "4k")), (), RULES, COSTS)
    assert chosen(selection) == {"4k", "8k"}
    assert [named(selection, name).added_bytes for name in ("4k", "8k")] == [4096, 4096]


def test_of_a_nested_pair_of_system_prompts_both_stay_while_both_are_used() -> None:
    inner, outer = seen("inner", 3000, 103, system=True), seen("outer", 9000, 98, "inner", system=True)
    assert chosen(select(traffic(inner, outer), (), RULES, COSTS)) == {"inner", "outer"}
    selection = select(traffic(inner._replace(requests=99.0), outer), (), RULES, COSTS)
    assert verdicts(selection) == {"inner": Verdict.CONTAINED, "outer": Verdict.CHOSEN}


def test_under_a_budget_the_most_requests_per_byte_win_and_the_beginning_of_a_prompt_too_large_is_kept() -> None:
    rules = replace(RULES, max_bytes=5000)
    often = (seen("1k", 1024, 50), seen("2k", 2048, 50, "1k"), seen("big", 8000, 50, "2k", system=True))
    selection = select(traffic(*often, seen("less", 2500, 20, system=True)), (), rules, COSTS)
    assert chosen(selection) == {"2k", "less"}
    assert verdicts(selection)["big"] is Verdict.OVER_BUDGET
    assert selection.total_bytes <= 5000


def test_of_equal_worth_the_system_prompt_wins() -> None:
    rules = replace(RULES, max_bytes=4096)
    selection = select(traffic(seen("fixed", 4096, 9), seen("system", 4096, 9, system=True)), (), rules, COSTS)
    assert chosen(selection) == {"system"}


def test_a_window_or_state_is_paid_for_by_each_pin_and_hits_only_where_a_pin_ends() -> None:
    shorter, longer = seen("2k", 2000, 60), seen("8k", 8000, 40, "2k")
    selection = select(traffic(shorter, longer), (), RULES, HYBRID)
    assert chosen(selection) == {"2k", "8k"}
    assert selection.total_bytes == 8000 + 2 * 500
    assert selection.saved_s_per_hour == pytest.approx((20 * 2000 + 40 * 8000) / 1000)
    selection = select(traffic(shorter._replace(requests=41.0), longer), (), RULES, HYBRID)
    assert chosen(selection) == {"8k"}
    assert selection.total_bytes == 8500
    assert selection.saved_s_per_hour == pytest.approx(40 * 8000 / 1000)


def test_what_is_pinned_yields_to_what_is_worth_much_more_only() -> None:
    rules = replace(RULES, max_bytes=4096)
    old, new = seen("old", 4096, 20), seen("new", 4096, 23)
    assert chosen(select(traffic(old, new), pinned(old), rules, COSTS)) == {"old"}
    assert chosen(select(traffic(old, new), pinned(new), rules, COSTS)) == {"new"}
    assert chosen(select(traffic(old, new._replace(requests=26.0)), pinned(old), rules, COSTS)) == {"new"}


def test_what_has_not_come_for_long_yields_to_what_comes_now() -> None:
    rules = replace(RULES, max_bytes=4096)
    # 30 requests in the window of an hour; then none for half an hour, in which 15 were expected.
    ended = seen("ended", 4096, 30, last_s=NOW_S - 1800)
    assert chosen(select(traffic(ended, seen("new", 4096, 6)), pinned(ended), rules, COSTS)) == {"new"}
    pausing = ended._replace(last_seen_s=NOW_S - 200)
    assert chosen(select(traffic(pausing, seen("new", 4096, 6)), pinned(pausing), rules, COSTS)) == {"ended"}
    shorter = seen("shorter", 2048, 30, last_s=0.0)
    longer = pausing._replace(parent=digest("shorter"))
    assert named(select(traffic(shorter, longer), (), rules, COSTS), "shorter").last_seen_s == NOW_S - 200


def test_what_is_pinned_stays_without_use_while_there_is_space() -> None:
    gone, rare = seen("gone", 4096, 0), seen("rare", 4096, 1, prompts=1)
    new = seen("new", 4096, 5)
    selection = select(traffic(rare, new), pinned(gone, rare), RULES, COSTS)
    assert chosen(selection) == {"gone", "rare", "new"}
    tight = replace(RULES, max_bytes=2 * 4096)
    selection = select(traffic(rare, new), pinned(gone, rare), tight, COSTS)
    assert [each.digest for each in selection.displaced] == [digest("gone")]
    assert selection.superfluous == ()


def test_pins_do_not_flap_while_counts_vary_by_a_tenth() -> None:
    rules, changes = replace(RULES, max_bytes=3 * 4096), 0
    pins: list[PinnedPrefix] = []
    for turn in range(60):
        prefixes = [seen(f"p{n}", 4096, 30 * (1 + 0.1 * ((turn * 7 + n * 3) % 5 - 2) / 2)) for n in range(8)]
        now = select(traffic(*prefixes), pins, rules, COSTS).chosen
        changes += len({each.digest for each in now} - {each.digest for each in pins})
        pins = pinned(*(each for each in prefixes if each.digest in {choice.digest for choice in now}))
    assert changes == 3


def test_what_began_with_a_longer_prefix_began_with_the_shorter_one_too() -> None:
    # The shorter one's counter was taken over and began again.
    selection = select(traffic(seen("1k", 1024, 1, prompts=1), seen("4k", 4096, 40, "1k")), (), RULES, COSTS)
    assert verdicts(selection) == {"1k": Verdict.CONTAINED, "4k": Verdict.CHOSEN}
    assert named(selection, "1k").requests_per_hour == 40


def test_parents_that_are_unknown_longer_or_in_a_circle_are_none() -> None:
    prefixes = [seen("a", 2000, 9, "b"), seen("b", 3000, 8, "a"), seen("c", 4000, 7, "gone"), seen("d", 1500, 6, "c")]
    prefixes += [seen(f"{n}", 5000 + n, 5, f"{n - 1}") for n in range(1000)]
    selection = select(traffic(*prefixes), (), RULES, COSTS)
    assert {"b", "c", "d"} <= chosen(selection)
    assert selection.total_bytes <= RULES.max_bytes


@pytest.mark.parametrize("costs", [COSTS, HYBRID], ids=["full attention", "hybrid"])
@pytest.mark.parametrize("seed", range(40))
def test_any_tree_is_accounted_for_to_the_token(seed: int, costs: PinCosts) -> None:
    random, prefixes = Random(seed), list[PrefixCount]()
    for number in range(60):
        parent = random.choice(prefixes) if prefixes and random.random() < 0.7 else None
        length = random.choice((500, 1500, 4000)) + (parent.num_tokens if parent else 0)
        requests = random.uniform(0, parent.requests if parent else 40)
        name = None if parent is None else parent.digest.decode().rstrip(".")
        prefixes.append(seen(f"{number}", length, requests, name, system=random.random() < 0.3))
    pins, rules = pinned(*random.sample(prefixes, 10)), replace(RULES, max_bytes=random.choice((5_000, 40_000)))
    selection = select(traffic(*prefixes), pins, rules, costs)
    known = {each.digest: each for each in prefixes}
    held: set[bytes] = set()
    for choice in selection.chosen:
        digest: bytes | None = choice.digest
        while digest is not None:
            held.add(digest)
            digest = known[digest].parent
    tokens = {digest: known[digest].num_tokens for digest in held}
    added = sum(tokens[digest] - tokens.get(known[digest].parent or b"", 0) for digest in held)
    num_chosen = len(selection.chosen)
    assert sum(choice.added_tokens for choice in selection.chosen) == added
    assert selection.total_bytes == added + num_chosen * costs.bytes_per_pin <= rules.max_bytes
    ended = {each.digest for each in (*selection.superfluous, *selection.displaced)}
    assert ended == {each.digest for each in pins} - {each.digest for each in selection.chosen}
    for choice in selection.choices:
        if choice.verdict is Verdict.CONTAINED:
            assert choice.contained_in in {each.digest for each in selection.chosen}


def test_the_order_of_the_counts_does_not_matter() -> None:
    prefixes = [seen(f"{n}", 1024 + n % 7, 5 + n % 3, f"{n - 7}" if n % 2 else None) for n in range(50)]
    rules = replace(RULES, max_bytes=20_000)
    assert select(traffic(*prefixes), (), rules, COSTS) == select(traffic(*reversed(prefixes)), (), rules, COSTS)


def test_no_step_holds_the_loop_up() -> None:
    prefixes = [seen(f"{n}", 1024 + n, 5 + n % 50, f"{n - 1}" if n % 7 else None) for n in range(4096)]
    run = SelectionRun(traffic(*prefixes), (), RULES, COSTS)
    gc.disable()  # a collection looks at all that other tests have imported: as long as all steps together
    try:
        began_s, steps_s = time.thread_time(), []
        for _ in run.steps():
            steps_s.append(time.thread_time() - began_s)
            began_s = time.thread_time()
    finally:
        gc.enable()
    assert run.selection is not None
    assert len(run.selection.choices) == 4096
    # A ratio within one run: no step is most of the work.
    assert max(steps_s) < 0.5 * sum(steps_s)


def test_costs_come_from_the_layout() -> None:
    full = GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=1600)
    window = GroupLayout(group_idx=1, chunk_tokens=32, useful_bytes=800, window_chunks=4)
    layout = KVLayout(num_ranks=2, rank_bytes=4096, num_writers=2, groups=(full, window))
    costs = PinCosts.of(layout, 0.5, 1000.0)
    assert (costs.bytes_per_token, costs.bytes_per_pin) == (100.0, 3200.0)


@pytest.mark.parametrize("changed", [{"bytes_per_token": 0.0}, {"bytes_per_pin": -1.0}, {"prefill_tokens_per_s": 0.0}])
def test_impossible_costs_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="use a"):
        replace(COSTS, **changed)


@pytest.mark.parametrize("costs", [COSTS, HYBRID])
def test_what_a_pin_with_a_name_begins_with_takes_nothing_of_the_budget(costs: PinCosts) -> None:
    counted = traffic(
        seen("system", 1024, 90),
        seen("policy", 4096, 80, "system", system=True),
        seen("longer", 5120, 40, "policy"),
        seen("other", 2048, 10, system=True),
    )
    rules = replace(RULES, max_bytes=1024 + 2048 + 3 * int(costs.bytes_per_pin))
    assert "longer" not in chosen(select(counted, (), rules, costs))
    selection = select(counted, (), rules, costs, [digest("policy")])
    assert chosen(selection) >= {"policy", "longer", "other"}
    assert named(selection, "policy").added_bytes == 0
    assert named(selection, "longer").added_bytes == 1024 + costs.bytes_per_pin
    assert selection.total_bytes <= rules.max_bytes
