from kvtier_connector.scheduler.forecasts import UNMEASURED_TOKENS_PER_S, PrefillRate, worth_waiting


def test_rate_is_a_guess_until_measured() -> None:
    rate = PrefillRate()
    assert rate.prefill_s(500) == 500 / UNMEASURED_TOKENS_PER_S
    rate.step_began(1000, 10.0)
    rate.step_ended(10.1)
    assert rate.tokens_per_s is not None
    assert round(rate.tokens_per_s) == 10_000


def test_a_configured_rate_is_taken_whatever_is_measured() -> None:
    rate = PrefillRate(50.0)
    rate.step_began(1000, 10.0)
    rate.step_ended(10.1)
    assert rate.prefill_s(500) == 10.0


def test_decode_steps_do_not_count() -> None:
    rate = PrefillRate()
    rate.step_began(8, 10.0)
    rate.step_ended(10.1)
    assert rate.tokens_per_s is None


def test_idle_time_between_steps_does_not_count() -> None:
    rate = PrefillRate()
    for began_s in (10.0, 500.0):
        rate.step_began(1000, began_s)
        rate.step_ended(began_s + 0.1)
    assert rate.tokens_per_s is not None
    assert round(rate.tokens_per_s) == 10_000


def test_overlapping_steps_are_not_counted_twice() -> None:
    rate = PrefillRate()
    rate.step_began(1000, 10.0)
    rate.step_began(1000, 10.05)
    rate.step_ended(10.1)
    rate.step_ended(10.2)
    assert rate.tokens_per_s is not None
    assert round(rate.tokens_per_s) == 10_000


def test_an_unmatched_end_is_ignored() -> None:
    PrefillRate().step_ended(1.0)


def test_worth_waiting() -> None:
    assert worth_waiting(10.1, now_s=10.0, deadline_s=10.2)
    assert not worth_waiting(10.3, now_s=10.0, deadline_s=10.2)
    assert worth_waiting(None, now_s=10.0, deadline_s=10.2), "an unmeasured rate gets the benefit of the doubt"
    assert not worth_waiting(10.1, now_s=10.2, deadline_s=10.2)
    assert worth_waiting(10.1, now_s=10.15, deadline_s=10.2), "late is not lost: computing has not caught up yet"
