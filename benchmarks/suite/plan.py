"""What a profile measures, and in which order."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import SERVED
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import say
from benchmarks.suite import daemon_growth
from benchmarks.suite.floor import measure_floor
from benchmarks.suite.load import LoadRun
from benchmarks.suite.matrix import MatrixRun
from benchmarks.suite.profiles import BLOCK_TOKENS, TURN_TOKENS, LoadShape, MatrixShape, Profile
from benchmarks.systems.all_systems import SYSTEMS
from benchmarks.systems.kvtier_system import OFF_DEVICE_CONFIG, KVTierAll
from benchmarks.systems.system import System
from benchmarks.systems.vllm_systems import VLLMAllFits, VLLMAlone

ALL_FITS = "alone-fits"
"""The system that only the load has: what the machine can do when vLLM's own prefix cache has everything."""
ALONE = "alone"
ALL_SYSTEMS: dict[str, type[System]] = {
    ALONE: VLLMAlone, "kvtier-all": KVTierAll, **SYSTEMS, ALL_FITS: VLLMAllFits,
}  # fmt: skip

Add = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The smallest unit that is measured as a whole; `measure` passes samples to the function that it gets."""

    name: str
    measure: Callable[[Add], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases of a profile."""

    profile: Profile
    systems: Sequence[str]
    dtype: str
    home: Path

    def cases(self) -> Iterator[Case]:
        """Yield all, in the order in which they are measured: what matters most first, rounds outermost."""
        for number in range(max((shape.rounds for shape in self.profile.matrices), default=0)):
            yield Case(name=f"floor/{number}", measure=partial(measure_floor, self.home))
            for shape in self.profile.matrices:
                if number < shape.rounds:
                    for name in in_turns([name for name in self.systems if name != ALL_FITS], number):
                        yield self._matrix(name, shape, number)
        yield from self._growth()
        if load := self.profile.load:
            # vLLM alone last: what the time limit leaves out then is nothing that kvtier is compared with.
            systems = sorted(self.systems, key=lambda name: name == ALONE)
            for number in range(load.rounds):
                for name in in_turns(systems, number):
                    yield self._load(name, load, number)

    def _matrix(self, name: str, shape: MatrixShape, number: int) -> Case:
        def measure(add: Add) -> None:
            model = cached_model(f"suite-{shape.name}", shape.model)
            options = _options(model, shape.pool_blocks, max(shape.lengths) + TURN_TOKENS, self.dtype)
            options = replace(options, connector_config=OFF_DEVICE_CONFIG)
            with _system(name, self.home, options, shape.host_gib) as system:
                MatrixRun(system=system, shape=shape, model=model, round=number, add=add).measure()

        return Case(name=f"matrix/{shape.name}/{name}/{number}", measure=measure)

    def _load(self, name: str, shape: LoadShape, number: int) -> Case:
        def measure(add: Add) -> None:
            with load_system(name, self.home, shape, self.dtype) as (system, model):
                LoadRun(system=system, shape=shape, model=model, round=number, add=add).measure()

        return Case(name=f"load/{name}/{number}", measure=measure)

    def _growth(self) -> Iterator[Case]:
        shape = self.profile.growth
        if shape is None or "kvtier" not in self.systems:
            return
        mib, rounds = shape.service_mib, shape.rounds
        yield Case(name="moved", measure=partial(daemon_growth.bytes_moved, mib))
        for count in shape.pins:
            yield Case(name=f"pins/{count}", measure=partial(daemon_growth.pins, count, rounds))
        for count in shape.sessions:
            yield Case(name=f"sessions/{count}", measure=partial(daemon_growth.sessions, count))
        for count in shape.chunks:
            yield Case(name=f"chunks/{count}", measure=partial(daemon_growth.chunks, count, rounds))


@contextmanager
def load_system(name: str, home: Path, shape: LoadShape, dtype: str) -> Iterator[tuple[System, Path]]:
    """Make a system for `shape`, with its model; `ALL_FITS` gets a pool in which everything fits."""
    model = cached_model("suite-8x512", SERVED)
    pool_blocks = shape.fitting_blocks if name == ALL_FITS else shape.pool_blocks
    options = _options(model, pool_blocks, shape.prompt_tokens + TURN_TOKENS, dtype)
    with _system(name, home, options, 1) as system:
        yield system, model


def _options(model: Path, pool_blocks: int, max_model_len: int, dtype: str) -> EngineOptions:
    return EngineOptions(
        model=str(model),
        max_model_len=max_model_len,
        block_size=BLOCK_TOKENS,
        pool_blocks=pool_blocks,
        max_batched_tokens=4096,
        dtype=dtype,
    )


def in_turns(systems: Sequence[str], number: int) -> list[str]:
    """Return the systems, with another one first in every round."""
    turn = number % max(1, len(systems))
    return [*systems[turn:], *systems[:turn]]


@contextmanager
def _system(name: str, home: Path, options: EngineOptions, host_gib: int) -> Iterator[System]:
    """Make a system in a folder of its own; both are gone afterwards. `host_gib`: of 16-bit KV."""
    system = ALL_SYSTEMS[name](home / name, options, 2 * host_gib if options.dtype == "float32" else host_gib)
    try:
        yield system
    except Exception:
        say(system.log_tails())
        raise
    finally:
        system.clean_up()
        shutil.rmtree(home / name, ignore_errors=True)
