"""The benchmark of announcements ends, as a vLLM without requests falls asleep again."""

from benchmarks.event_loop.announcements import measure, prompts, round_of


def test_a_round_announces_all_and_repeats_it() -> None:
    costs = round_of(prompts(3, 4))
    assert costs.announced_s >= 0
    assert costs.longest_step_s <= costs.announced_s + costs.repeated_s


def test_a_row_has_every_column() -> None:
    assert measure(2, 3, rounds=1).count("|") == 8
