"""A client that asks one prompt without pause, and the proof that it was always answered, and right."""

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.harness.engine import Engine
from benchmarks.harness.process import wait_until
from tests.e2e.harness import HANG_S, Answer, Tokens, ask, forget_gpu, prefix_cache_hit

# A request under a salt has other chunk keys: the prompt is not pinned under this one, so kvtier never restores it.
_REFERENCE_SALT = "reference"
_MIN_ANSWERS = 3


@dataclass
class Client:
    """Asks an engine for a prefix that kvtier may restore, with a question behind it.

    Attributes:
        references: vLLM's own answers, by the tokens of the prompt that it had in its prefix cache.
    """

    engine: Engine
    prefix: Tokens
    question: Tokens
    references: dict[int, Answer] = field(default_factory=dict)

    def ask(self) -> Answer:
        """Ask while vLLM itself has forgotten the prefix."""
        forget_gpu(self.engine)
        return ask(self.engine, self.prefix + self.question)

    def check(self, answer: Answer) -> None:
        """Compare an answer, to the last digit of its logprobs, with vLLM's own for as many tokens cached."""
        cached, prompt = answer.cached_tokens, self.prefix + self.question
        if cached not in self.references:
            self.references[cached] = (
                prefix_cache_hit(self.engine, prompt[:cached], prompt[cached:], cache_salt=_REFERENCE_SALT)
                if cached
                else self._computed()
            )
        assert answer.logprobs == self.references[cached].logprobs, answer

    def _computed(self) -> Answer:
        forget_gpu(self.engine)
        answer = ask(self.engine, self.prefix + self.question, cache_salt=_REFERENCE_SALT)
        assert answer.cached_tokens == 0, answer
        return answer

    def resume_s(self) -> float:
        """Ask until the whole prefix is restored; return how long that took."""
        return wait_until(self._is_restored, HANG_S, "hits again")

    def _is_restored(self) -> bool:
        answer = self.ask()
        self.check(answer)
        return answer.cached_tokens == answer.restored_tokens == len(self.prefix)

    @contextmanager
    def asking(self) -> Iterator[list[Answer]]:
        """Ask without pause while the block runs, and at least three times; at its end every answer is checked."""
        answers, errors, stop = list[Answer](), list[BaseException](), threading.Event()

        def run() -> None:
            try:
                while not stop.is_set():
                    answers.append(self.ask())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield answers
            wait_until(lambda: len(answers) >= _MIN_ANSWERS or bool(errors), HANG_S, "answers")
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]
        for answer in answers:
            self.check(answer)

    def summary(self, answers: list[Answer]) -> str:
        """Say how many were answered, from where, and how fast; all of them were checked."""
        num_whole = sum(answer.cached_tokens == len(self.prefix) for answer in answers)
        num_computed = sum(answer.cached_tokens == 0 for answer in answers)
        seconds = [answer.seconds for answer in answers]
        return (
            f"{len(answers)} requests answered right: {num_whole} restored, "
            f"{len(answers) - num_whole - num_computed} in part, {num_computed} computed; "
            f"median {statistics.median(seconds):.2f} s, slowest {max(seconds):.2f} s"
        )
