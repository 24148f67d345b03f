from kvtier.client.circuit_breaker import CircuitBreaker


def test_stays_closed_while_answers_are_in_time() -> None:
    breaker = CircuitBreaker(0.25)
    deadline_s = breaker.deadline_s(10.0)
    assert deadline_s == 10.25
    assert not breaker.late(deadline_s, 10.2)
    assert breaker.is_closed


def test_opens_on_the_first_late_answer_and_takes_earlier_questions_with_it() -> None:
    breaker = CircuitBreaker(0.25)
    assert breaker.late(10.25, 10.25)
    assert not breaker.is_closed
    assert breaker.late(99.0, 10.3), "a question asked just before it opened must not wait its own turn"


def test_closes_when_a_probe_is_answered() -> None:
    breaker = CircuitBreaker(0.25)
    breaker.late(0.0, 1.0)
    breaker.close()
    assert breaker.is_closed
    assert not breaker.late(2.0, 1.5)
