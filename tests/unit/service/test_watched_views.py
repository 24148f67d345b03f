"""One view for all who watch a prompt, and rests between the looks."""

import asyncio
import time
from dataclasses import replace

from kvtier.ledger import PromptRow
from kvtier.prompts.states.status import PromptState, PromptView, view_prompt
from kvtier.prompts.states.watched_views import WatchedViews
from tests.fakes.rows import prompt_row

LOOK_S = 0.01


class Looks:
    """Looks that take a while.

    Attributes:
        names: Of the prompts looked at, in order.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.views = WatchedViews(self._view_of)

    async def _view_of(self, prompt: PromptRow) -> PromptView:
        self.names.append(prompt.name)
        await asyncio.sleep(LOOK_S)
        return view_prompt(prompt, (), ())


def test_all_watchers_of_a_prompt_share_a_view() -> None:
    async def scenario() -> None:
        looks, prompt, now_s = Looks(), prompt_row(), time.monotonic()
        seen = await asyncio.gather(*(looks.views.view_since(prompt, now_s) for _ in range(100)))
        assert looks.names == ["support"]
        assert all(view is seen[0] for view in seen)
        await looks.views.view_since(prompt, time.monotonic())
        assert len(looks.names) == 2, "a later watcher sees what is later"
        changed = replace(prompt, pinned=False)
        assert (await looks.views.view_since(changed, now_s)).prompt is changed
        assert seen[0].state is PromptState.WAITING

    asyncio.run(scenario())


def test_watchers_of_many_prompts_take_a_fifth_of_the_loop() -> None:
    async def scenario() -> None:
        looks, began_s = Looks(), time.monotonic()
        prompts = [prompt_row(str(n), str(n)) for n in range(20)]
        await asyncio.gather(*(looks.views.view_since(prompt, began_s) for prompt in prompts))
        assert looks.names == [str(n) for n in range(20)]
        assert time.monotonic() - began_s >= 20 * 4.9 * LOOK_S
        assert len(looks.views) < 20, "the old ones are dropped"

    asyncio.run(scenario())
