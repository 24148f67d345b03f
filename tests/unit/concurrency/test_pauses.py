"""When those look again that can only look."""

import asyncio

from kvtier.concurrency.pauses import until_next


def test_looks_with_one_period_are_due_at_the_same_time() -> None:
    """An idle daemon woke 46 times a second, half of what it used of a core."""

    async def run() -> list[bool]:
        loop, looks = asyncio.get_running_loop(), list[bool]()

        async def look(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            for _ in range(3):
                before_s, pause_s, after_s = loop.time(), until_next(0.05), loop.time()
                assert 0 < pause_s <= 0.05
                due_s = 0.05 * round((after_s + pause_s) / 0.05)
                looks.append(before_s + pause_s - 1e-6 <= due_s <= after_s + pause_s + 1e-6)
                await asyncio.sleep(pause_s)

        await asyncio.gather(look(0), look(0.007), look(0.013))
        return looks

    assert asyncio.run(run()) == [True] * 9
