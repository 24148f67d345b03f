"""How much is measured: `smoke` shows that everything runs, `short` fits 15 minutes, `disk` 45, `long` two hours.

Seconds of one case on two cores of a cloud machine (the slower of two that were tried), from the samples of earlier
runs; what no run had yet is in brackets, from the tokens to compute. An 8,000-token prompt takes 4.7 s to compute with
8x512 (a faster machine: 2.4) and [22] with 16x1024 (11).

| case | vLLM alone | kvtier | LMCache | vLLM fs tier | alone, all fits |
|---|---|---|---|---|---|
| matrix, 8x512, 3 prompts of each length | 70 | 130 | [210] | [140] | |
| matrix, 8x512, 2 prompts of each length | [55] | [110] | [185] | [120] | |
| matrix, 16x1024, 3 prompts of each length | [220] | [230] | [310] | [250] | |
| load: 16 users | 45 | 45 | [50] | [50] | [45] |
| load: 16 users, 64, 16 beside busy loops, a kill | [175] | [105] | [190] | [105] | [75] |

So `short` is 8 to 10 minutes of matrix, 1 of the daemon alone and 4 of load; `long` is 28 and 51 minutes of matrices, 4
of the daemon alone and 33 of load.
"""

from dataclasses import dataclass, replace

from benchmarks.harness.model_specs import DEMO, SERVED, ModelSpec

BLOCK_TOKENS = 32
# Tokens of a context for the conversation behind the system prompt.
TURN_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class MatrixShape:
    """The matrix of TTFTs for one model.

    Attributes:
        name: Of the model, for people and files.
        lengths: Tokens of the system prompts.
        prompts: Different system prompts of each length: each is sent once per condition and round.
        rounds: Times that every system is started again; they take turns.
        pool_blocks: vLLM's KV cache: the longest prompt and some more.
        host_gib: Host memory of each system, enough for all prompts in 16 bits; twice that in float32.
        disk_only: Measure computing, and what the disk alone has after everything was restarted; nothing in between.
    """

    name: str
    model: ModelSpec
    lengths: tuple[int, ...]
    prompts: int
    rounds: int
    pool_blocks: int
    host_gib: int = 1
    disk_only: bool = False


@dataclass(frozen=True)
class Users:
    """Users at the same time; each sends its next turn when the last one was answered.

    Attributes:
        busy_loops: Processes that only use a core, beside everything else.
    """

    count: int
    busy_loops: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.count} users" + (f", {self.busy_loops} busy loops" if self.busy_loops else "")


@dataclass(frozen=True, kw_only=True)
class LoadShape:
    """What users send, and which numbers of them come one after the other to the same vLLM.

    Attributes:
        system_prompts: Number to choose from; together they are more than the pool can hold.
        prompt_tokens: Tokens of each.
        users: Measured in this order.
        turns: Turns of each user.
        kill: Whether the first users come again at the end, and the server is killed (-9) in the middle.
        rounds: Times that every system is measured.
    """

    system_prompts: int = 8
    prompt_tokens: int = 2000
    users: tuple[Users, ...] = (Users(16),)
    turns: int = 5
    answer_tokens: int = 16
    pool_blocks: int = 288
    kill: bool = False
    rounds: int = 1

    @property
    def fitting_blocks(self) -> int:
        """Blocks in which all prompts fit, and the conversations of all users."""
        most = max(users.count for users in self.users)
        return self.system_prompts * -(-self.prompt_tokens // BLOCK_TOKENS) + most * TURN_TOKENS // BLOCK_TOKENS


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


# A token has 32 KiB: the pool 320 MiB, the prompts of a round 1.1 GiB, the flood 0.4, which peers keep.
_LARGER = MatrixShape(
    name="16x1024", model=DEMO, lengths=(1000, 3000, 8000), prompts=3, rounds=3, pool_blocks=320, host_gib=3
)

PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="smoke",
            limit_min=10,
            matrices=(_small((1000,), prompts=2, rounds=1, pool_blocks=96),),
            load=LoadShape(
                prompt_tokens=500, users=(Users(8), Users(8, busy_loops=2)), turns=2, pool_blocks=96, kill=True
            ),
            growth=GrowthShape(pins=(1, 100), chunks=(1000,), sessions=(1, 2), rounds=1, service_mib=32),
        ),
        Profile(
            name="short",
            limit_min=14,  # the last case ends within 15
            matrices=(_small((1000, 3000, 8000), prompts=2, rounds=1, pool_blocks=320),),
            load=LoadShape(),
            growth=GrowthShape(chunks=(1000, 100_000)),
        ),
        Profile(
            name="disk",
            limit_min=40,
            matrices=(
                replace(_small((1000, 3000, 8000), prompts=3, rounds=3, pool_blocks=320), disk_only=True),
                replace(_LARGER, disk_only=True),
            ),
            load=None,
            growth=None,
        ),
        Profile(
            name="long",
            limit_min=116,  # the last case ends within 120
            # Nine samples a cell.
            matrices=(_small((1000, 3000, 8000), prompts=3, rounds=3, pool_blocks=320), _LARGER),
            load=LoadShape(users=(Users(16), Users(16, busy_loops=2), Users(64)), kill=True, rounds=3),
            growth=GrowthShape(
                pins=(1, 10, 100, 1000), chunks=(1000, 10_000, 100_000, 200_000), rounds=7, service_mib=1024
            ),
        ),
    )
}
