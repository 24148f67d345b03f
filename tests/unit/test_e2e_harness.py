"""What end-to-end tests leave to those who read of their failure."""

from contextlib import suppress

import pytest

from benchmarks.harness.engine import EngineOptions
from tests.e2e.harness import log_tails, running_stack


def test_a_failure_shows_the_ends_of_the_logs(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the stack ends with the test, and its folder with it."""
    with suppress(AssertionError), running_stack(EngineOptions(model="none"), start_daemon=False) as stack:
        (stack.home / "vllm-1.log").write_text("begin\n" + "line\n" * 100 + "the end\n")
        ((name, tail),) = log_tails()
        raise AssertionError
    assert name == str(stack.home / "vllm-1.log")
    assert tail.endswith("line\nthe end")
    assert "begin" not in tail
    assert f"--- {name}\n{tail}" in capsys.readouterr().out
    assert not list(log_tails())
