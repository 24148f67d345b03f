"""scripts/mutation: which changes are made to a module, and that each still compiles."""

import pytest
from check_words import ROOT
from mutation.mutants import mutants_of


def changed(body: str) -> list[str]:
    """Return what a line of a function becomes."""
    source = f"def f(self, a, b):\n    {body}\n"
    return [mutant.applied(source).splitlines()[1].strip() for mutant in mutants_of("a.py", source)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", ["x = (a <= b)", "x = (a >= b)"]),
        ("x = a and b", ["x = (a or b)", "x = (b)", "x = (a)"]),
        ("x = a // 2", ["x = (a * 2)", "x = a // 3"]),
        ("x += b", ["x -= b"]),
        ("x = not a", ["x = (a)"]),
        ("return a", ["return None"]),
        ("self.close()", ["pass"]),
        ("raise ValueError(a + 1)", ["pass"]),
        ("x = a if b else True", ["x = a if (not (b)) else True", "x = a if b else False"]),
    ],
)
def test_a_place_is_changed_in_each_way(line: str, expected: list[str]) -> None:
    assert changed(line) == expected


@pytest.mark.parametrize(
    "line",
    ["logger.info(1)", 'log_event(logger, "x", n=1)', "x: Literal[1]", 'x = f"{a + 1}"', 'x = "a" + b', "return None"],
)
def test_what_no_caller_sees_is_left_alone(line: str) -> None:
    assert changed(line) == []


def test_what_is_outside_of_functions_is_left_alone() -> None:
    assert mutants_of("a.py", "A = 1 + 1\n@f(1)\ndef g(x: int = 2) -> int: ...\n") == []


def test_columns_are_counted_in_bytes() -> None:
    assert changed('x = "ü", a == b') == ['x = "ü", (a != b)']


def test_every_mutant_of_a_real_module_compiles() -> None:
    path = "kvtier/host/arena_tier.py"
    source = (ROOT / path).read_text()
    mutants = mutants_of(path, source)
    for mutant in mutants:
        compile(mutant.applied(source), path, "exec")
    assert len(mutants) > 100
