"""Users who send chats to one vLLM at the same time. A seed determines all chats, so every system gets the same.

The assistant's part in later turns is fixed text, not what the model wrote: so prompts are equal for all systems.
"""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.harness.engine import Engine
from benchmarks.measuring.chat_requests import question, streamed_event
from benchmarks.measuring.sized_prompts import SystemPrompt

TIMEOUT_S = 60.0
_NO_ANSWER = httpx.ReadTimeout.__name__
MAX_TURNS = 3
REPLY = "I have found your record and see what you mean. Shall I go ahead with it as described, within the usual limit?"

Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How one turn went.

    Attributes:
        began_s: Since the traffic began.
        ttft_s: Until the first token; None when the turn failed.
        gaps_s: Between tokens after it.
        error: Empty for none.
    """

    user: int
    began_s: float
    ttft_s: float | None
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    error: str


def plan(num_users: int, num_turns: int, prompts: Sequence[SystemPrompt], seed: int) -> list[list[Messages]]:
    """Return what each user sends, turn by turn: conversations of one to three turns behind a prompt drawn for each."""
    users = []
    for user in range(num_users):
        chance = random.Random(f"{seed}-{user}")
        turns: list[Messages] = []
        while len(turns) < num_turns:
            messages = chance.choice(prompts).messages(question(chance.randrange(10**9)))
            for _ in range(chance.randint(1, MAX_TURNS)):
                turns.append(list(messages))
                messages += [
                    {"role": "assistant", "content": REPLY},
                    {"role": "user", "content": question(chance.randrange(10**9))},
                ]
        users.append(turns[:num_turns])
    return users


@dataclass
class Traffic:
    """One run of all users, in a thread of its own, so that the caller can kill and start servers meanwhile.

    A user who gets no answer within `timeout_s` leaves.

    Attributes:
        turns: Finished turns, in order of their answers.
    """

    engine: Engine
    users: Sequence[Sequence[Messages]]
    answer_tokens: int
    turns: list[Turn] = field(default_factory=list)
    timeout_s: float = TIMEOUT_S

    def start(self) -> None:
        """Start the users."""
        self._began_s = time.perf_counter()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="users", daemon=True)
        self._thread.start()

    def finish(self) -> float:
        """Wait for the last answer; return how long all took."""
        self._thread.join()
        return self.wall_s

    @property
    def num_planned(self) -> int:
        """Turns that will have been sent at the end."""
        return sum(map(len, self.users))

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.engine.url, timeout=self.timeout_s, limits=limits) as client:
            await asyncio.gather(*(self._work(client, user, turns) for user, turns in enumerate(self.users)))
        self.wall_s = time.perf_counter() - self._began_s

    async def _work(self, client: httpx.AsyncClient, user: int, turns: Sequence[Messages]) -> None:
        for number, messages in enumerate(turns):
            turn = await self._ask(client, user, messages)
            self.turns.append(turn)
            if turn.error.startswith(_NO_ANSWER):
                not_sent = replace(turn, error=f"not sent: {self.timeout_s:g} s without an answer before")
                self.turns += [not_sent] * (len(turns) - number - 1)
                return

    async def _ask(self, client: httpx.AsyncClient, user: int, messages: Messages) -> Turn:
        body = {
            "model": "model",
            "messages": messages,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        began_s, error = time.perf_counter(), ""
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    event = streamed_event(line)
                    if event.get("choices") and event["choices"][0]["delta"].get("content"):
                        arrivals.append(time.perf_counter())
                    usage = event.get("usage") or usage
        except httpx.HTTPError as problem:
            error = f"{type(problem).__name__}: {problem}"
        return Turn(
            user=user,
            began_s=began_s - self._began_s,
            ttft_s=arrivals[0] - began_s if arrivals else None,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(arrivals)),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            error=error or ("" if arrivals else "no token came"),
        )
