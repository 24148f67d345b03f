"""How much is measured: `smoke` shows that everything runs, `short` fits 20 minutes, `long` is for numbers to quote."""

from dataclasses import dataclass

from benchmarks.harness.model_specs import DEMO, SERVED, ModelSpec

BLOCK_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class MatrixShape:
    """The matrix of TTFTs for one model.

    Attributes:
        name: Of the model, for people and files.
        lengths: Tokens of the system prompts.
        prompts: Different system prompts of each length: each is sent once per condition and round.
        rounds: Times that every system is started again; they take turns.
        pool_blocks: vLLM's KV cache: the longest prompt and some more.
        host_gib: Host memory of each system, enough for all prompts.
    """

    name: str
    model: ModelSpec
    lengths: tuple[int, ...]
    prompts: int
    rounds: int
    pool_blocks: int
    host_gib: int = 1


@dataclass(frozen=True, kw_only=True)
class LoadShape:
    """Users who send requests at the same time.

    Attributes:
        system_prompts: Number to choose from; together they are more than the pool can hold.
        prompt_tokens: Tokens of each.
        users: Users at the same time; each sends its next turn when the last one was answered.
        turns: Turns of each user.
        rounds: Times that every system is measured.
    """

    system_prompts: int = 8
    prompt_tokens: int = 2000
    users: int = 16
    turns: int = 5
    answer_tokens: int = 16
    pool_blocks: int = 288
    rounds: int = 1


@dataclass(frozen=True, kw_only=True)
class GrowthShape:
    """Numbers of pins, chunks and sessions, and how often each is measured."""

    pins: tuple[int, ...] = (1, 100, 1000)
    chunks: tuple[int, ...] = (1000, 200_000)
    sessions: tuple[int, ...] = (1, 2, 4)
    rounds: int = 3
    service_mib: int = 256


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one run measures.

    Attributes:
        limit_min: No case starts after this many minutes.
    """

    name: str
    limit_min: float
    matrices: tuple[MatrixShape, ...]
    load: LoadShape | None
    growth: GrowthShape | None


def _small(lengths: tuple[int, ...], prompts: int, rounds: int, pool_blocks: int) -> MatrixShape:
    return MatrixShape(
        name="8x512", model=SERVED, lengths=lengths, prompts=prompts, rounds=rounds, pool_blocks=pool_blocks
    )


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="smoke",
            limit_min=10,
            matrices=(_small((1000,), prompts=2, rounds=1, pool_blocks=96),),
            load=LoadShape(prompt_tokens=500, users=8, turns=2, pool_blocks=96),
            growth=GrowthShape(pins=(1, 100), chunks=(1000,), sessions=(1, 2), rounds=1, service_mib=32),
        ),
        Profile(
            name="short",
            limit_min=17,  # the last case ends within 20
            matrices=(_small((1000, 3000, 8000), prompts=3, rounds=1, pool_blocks=320),),
            load=LoadShape(),
            growth=GrowthShape(),
        ),
        Profile(
            name="long",
            limit_min=150,
            # Nine samples a cell.
            matrices=(
                _small((1000, 3000, 8000), prompts=3, rounds=3, pool_blocks=320),
                MatrixShape(
                    name="16x1024", model=DEMO, lengths=(3000,), prompts=3, rounds=3, pool_blocks=144, host_gib=2
                ),
            ),
            load=LoadShape(rounds=3),
            growth=GrowthShape(
                pins=(1, 10, 100, 1000), chunks=(1000, 10_000, 100_000, 200_000), rounds=7, service_mib=1024
            ),
        ),
    )
}
