"""What is tried again and again logs a problem when it begins."""

from kvtier.obs.log import LastProblem


def test_a_problem_that_lasts_is_one_line() -> None:
    last = LastProblem()
    asked = ["", "a", "a", "b", "a", "", "", "a"]
    assert [last.becomes(problem) for problem in asked] == [False, True, False, True, True, False, False, True]
