"""When those look again that can only look."""

import asyncio

from kvtier.concurrency.pauses import until_next


def test_looks_with_one_period_are_due_at_the_same_time() -> None:
    """An idle daemon woke 46 times a second, half of what it used of a core."""

    async def run() -> list[float]:
        loop, looks = asyncio.get_running_loop(), list[float]()

        async def look(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            for _ in range(3):
                pause_s = until_next(0.05)
                assert 0 < pause_s <= 0.05
                looks.append(round((loop.time() + pause_s) / 0.05, 3))
                await asyncio.sleep(pause_s)

        await asyncio.gather(look(0), look(0.007), look(0.013))
        return looks

    looks = asyncio.run(run())
    assert len(looks) == 9
    assert all(look == int(look) for look in looks)
