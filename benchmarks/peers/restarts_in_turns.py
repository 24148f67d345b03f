"""The course of the measurement: store once, then stop, empty the caches and restart, with systems taking turns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.measuring.chat_requests import PINNED_VARIANT, Answer, ask_pinned, forget_device_cache, greet
from benchmarks.measuring.storage import allocated_bytes, drop_page_cache
from benchmarks.systems.system import Ending, System

NUM_AGAIN = 5
# A hit has at least this much of the prompt: whole chunks of it, without the question.
HIT_RATIO = 0.85
QUESTIONS_PER_START = 1 + NUM_AGAIN


@dataclass(frozen=True, kw_only=True)
class Start:
    """What was measured after one restart.

    Attributes:
        first: The first request with the prompt.
        again: Later ones, each after vLLM's prefix cache was emptied.
    """

    round: int
    ending: Ending
    first: Answer
    again: tuple[Answer, ...]

    def numbered(self) -> Iterator[tuple[int, Answer]]:
        """Yield every answer with the number of its question."""
        yield from zip(question_numbers(self.round, self.ending), (self.first, *self.again), strict=True)


@dataclass(kw_only=True)
class Results:
    """Everything measured.

    Attributes:
        cold: vLLM alone, prompts it never saw, by round.
        prefix_hits: vLLM alone, its prefix cache: round -> question number -> answer.
        starts: By system name.
        stored_bytes: Bytes on disk after the prompt was stored, by system name.
        skipped: Why a system has no result, or no more of them.
    """

    cold: dict[int, list[Answer]] = field(default_factory=dict)
    prefix_hits: dict[int, dict[int, Answer]] = field(default_factory=dict)
    starts: dict[str, list[Start]] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def is_hit(answer: Answer) -> bool:
    """Whether the long prompt was restored and not computed."""
    return answer.cached_tokens >= HIT_RATIO * answer.prompt_tokens


def store(system: System, results: Results) -> None:
    """Bring the prompt to disk, once."""
    with system.serving() as (engine, _):
        greet(engine)
        system.store(engine)
    results.stored_bytes[system.name] = allocated_bytes(system.disk_dir)


def question_numbers(round_number: int, ending: Ending) -> range:
    """Return the questions of one restart: equal for all systems, and never used twice."""
    start = 1 + (2 * round_number + list(Ending).index(ending)) * QUESTIONS_PER_START
    return range(start, start + QUESTIONS_PER_START)


def measure_frame(alone: System, round_number: int, results: Results) -> None:
    """Ask vLLM alone: two prompts that it never saw, then this round's questions behind a prompt that it has."""
    with alone.serving() as (engine, processes):
        greet(engine)
        results.cold[round_number] = [
            ask_pinned(engine, processes, number=0, variant=variant) for variant in (PINNED_VARIANT, PINNED_VARIANT + 1)
        ]
        numbers = [number for ending in Ending for number in question_numbers(round_number, ending)]
        results.prefix_hits[round_number] = {number: ask_pinned(engine, processes, number) for number in numbers}


def measure_restarts(system: System, round_number: int, results: Results, say: Callable[[str], None]) -> None:
    """Restart after a stop, ask, kill -9, restart, ask; some systems only after a stop."""
    # The session that stored was stopped, and so is the last one of each round.
    for ending, next_ending in zip(system.endings, (*system.endings[1:], Ending.STOPPED), strict=True):
        result = _restart(system, round_number, ending, kill=next_ending is Ending.KILLED)
        results.starts.setdefault(system.name, []).append(result)
        first = result.first
        say(
            f"round {round_number + 1}, {system.name}, after {ending.value}: {first.cached_tokens} of "
            f"{first.prompt_tokens} tokens from {'+'.join(first.by_source) or 'nowhere'}, TTFT {first.ttft_s:.3f} s"
        )


def _restart(system: System, round_number: int, ending: Ending, *, kill: bool) -> Start:
    system.forget_host_memory()
    drop_page_cache(system.disk_dir)
    first_number, *later = question_numbers(round_number, ending)
    with system.serving() as (engine, processes):
        greet(engine)
        first = ask_pinned(engine, processes, first_number)
        again = []
        for number in later:
            forget_device_cache(engine)
            again.append(ask_pinned(engine, processes, number))
        if kill:
            for process in reversed(processes):
                process.kill()
    return Start(round=round_number, ending=ending, first=first, again=tuple(again))
