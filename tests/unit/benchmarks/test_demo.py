"""The parts of `make demo`: both acts are shown and checked, and a prompt that is never found ends it."""

import io
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from benchmarks.demo import found_prompt
from benchmarks.demo.result import draw, table
from benchmarks.demo.stage import DemoError, Stage
from benchmarks.demo.story import Act, DemoCase, Story
from benchmarks.measuring.chat_requests import Answer
from benchmarks.measuring.process_usage import BytesRead
from kvtier._pb.cache_pb2 import PromptStatus

NUM_TOKENS = 3008


def answer(ttft_s: float, **by_source: int) -> Answer:
    return Answer(
        ttft_s=ttft_s,
        prompt_tokens=3050,
        cached_tokens=sum(by_source.values()),
        by_source=by_source,
        tokens=(),
        logprobs=(),
        read=BytesRead(calls=0, device=0),
    )


def act(title: str, *cases: DemoCase) -> Act:
    return Act(title=title, variant=0, num_tokens=NUM_TOKENS, cases=list(cases))


def case(name: str, expected: str, by_source: dict[str, int]) -> DemoCase:
    return DemoCase(name=name, expected=expected, answer=answer(0.2, **by_source))


def story(*, found: dict[str, int] | None = None) -> Story:
    named = act("by hand", case("after a flood", "device", {"device": NUM_TOKENS}))
    by_itself = act("found", case("vLLM restarted", "host", {"host": NUM_TOKENS} if found is None else found))
    return Story(cold=[answer(4.0), answer(6.0)], acts=[named, by_itself])


@pytest.mark.parametrize(
    ("found", "num_failures"),
    [
        ({"host": NUM_TOKENS}, 0),
        ({"host": NUM_TOKENS - 64}, 0),
        ({"host": NUM_TOKENS - 65}, 1),
        ({"disk": NUM_TOKENS}, 1),
        ({"host": 1504, "disk": 1504}, 1),
        ({}, 1),
    ],
)
def test_a_case_of_the_second_act_fails_unless_the_expected_tier_served_it(
    found: dict[str, int], num_failures: int
) -> None:
    failures = story(found=found).failures()
    assert len(failures) == num_failures
    assert all(line.startswith("found, vLLM restarted: ") for line in failures)


def test_a_case_of_the_first_act_fails_as_well() -> None:
    computed = Story(cold=[answer(4.0)], acts=[act("by hand", case("right after", "device", {})), *story().acts])
    (line,) = computed.failures()
    assert line == "by hand, right after: 0 tokens came from device, expected at least 2944"


def test_the_table_has_the_cold_prompt_and_both_acts_in_order() -> None:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        console.print(table(story()))
    lines = [line for line in capture.get().splitlines() if "│" in line]
    assert [line.split("│")[1].strip() for line in lines] == [
        "cold: a prompt without a pin (median of 2, 4.00-6.00 s)",
        "by hand",
        "after a flood",
        "found",
        "vLLM restarted",
    ]
    assert "kvtier, host memory" in lines[-1]
    assert " 4 % " in lines[-1]


def test_the_chart_has_a_bar_for_each_case(tmp_path: Path) -> None:
    both, one = tmp_path / "both.png", tmp_path / "one.png"
    whole = story()
    draw(whole, "model", "bfloat16", both)
    draw(Story(cold=whole.cold, acts=whole.acts[:1]), "model", "bfloat16", one)
    with Image.open(both) as two_acts, Image.open(one) as one_act:
        assert two_acts.height > one_act.height


class BlindStage(Stage):
    """One whose vLLM answers, and whose daemon pins nothing by itself; no process runs."""

    def __init__(self) -> None:
        self.console = Console(file=io.StringIO())
        self.cold = []
        self.num_asked = 0

    def ask(self, variant: int) -> Answer:
        assert variant == found_prompt.VARIANT
        self.num_asked += 1
        return answer(4.0) if self.num_asked == 1 else answer(0.2, device=NUM_TOKENS)

    def cli(self, *args: str) -> None:
        pass

    def cli_text(self, *args: str) -> str:
        assert args == ("advise",)
        return "worth a pin: none yet"

    def pins(self) -> list[PromptStatus]:
        return []


def test_a_prompt_that_is_never_pinned_ends_the_demo_with_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_prompt, "PAUSE_S", 0.0)
    stage = BlindStage()
    with pytest.raises(DemoError, match=r"(?s)after 13 requests .* pinned no prompt by itself.*worth a pin: none yet"):
        found_prompt.play(stage)
    assert stage.num_asked == 1 + found_prompt.MAX_REQUESTS
