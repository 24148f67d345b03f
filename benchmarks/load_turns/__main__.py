"""Users at once against systems that are all in memory and take turns: throughput, waiting times, what was computed.

usage: python -m benchmarks.load_turns [--systems kvtier,kvtier-all,vllm-fs,alone-fits] [--users 16,64]
           [--busy-loops 0] [--rounds 4] [--turns 5]

The load is that of the suite (`benchmarks.suite.load`): conversations behind 8 system prompts of 2,000 tokens, of which
vLLM's pool holds four and a half. There every system is started for itself, some minutes after the last; here all are
started once, keep their processes and memory, and are measured one after the other, another first in each round, while
the others are stopped (SIGSTOP). So slow changes of the machine reach all alike. Memory has to hold them all.

`alone-fits` is vLLM with a pool in which everything fits: what the machine can do.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness.engine import Engine
from benchmarks.harness.process import Process, StartError, interrupt_on_signals, say
from benchmarks.measuring.chat_requests import greet
from benchmarks.measuring.machine import fast_dtype, hardware, versions
from benchmarks.measuring.samples import Records
from benchmarks.measuring.sized_prompts import SystemPrompt
from benchmarks.suite.load import LoadRun
from benchmarks.suite.plan import ALL_SYSTEMS, in_turns, load_system
from benchmarks.suite.profiles import LoadShape, Users
from benchmarks.suite.reports.load_tables import load_tables
from benchmarks.systems.system import SetupError, System


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A system that is in memory, stopped unless it is measured."""

    system: System
    model: Path
    servers: list[Process]
    engine: Engine
    prompts: list[SystemPrompt]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run; the server first, which has to answer when its engine goes on."""
        for process in (*self.servers, self.engine):
            process.resume()
        try:
            yield
        finally:
            for process in (self.engine, *self.servers):
                process.pause()


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--systems", default="kvtier,kvtier-all,vllm-fs,alone-fits", help="default: %(default)s")
    parser.add_argument("--users", default="16,64", help="users at once, one run for each number")
    parser.add_argument("--busy-loops", type=int, default=0, help="processes that only use a core beside each run")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5, help="of each user in a run")
    parser.add_argument("--dtype", default=fast_dtype())
    parser.add_argument("--out", type=Path, default=Path("bench-results/load_turns.jsonl"), help="raw samples")
    options = parser.parse_args(arguments)
    options.systems = list(dict.fromkeys(options.systems.split(",")))
    if unknown := set(options.systems) - set(ALL_SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))} unknown, choose from {', '.join(ALL_SYSTEMS)}")
    try:
        options.users = tuple(Users(int(count), options.busy_loops) for count in options.users.split(","))
    except ValueError:
        parser.error(f"--users: {options.users} is not a list of numbers; write for example 16,64")
    return options


def run(options: argparse.Namespace, records: Records, home: Path) -> None:
    """Start all systems, then measure them by turns."""
    shape = LoadShape(users=options.users, turns=options.turns)
    with ExitStack() as stack:
        sides: dict[str, _Side] = {}
        for name in options.systems:
            with ExitStack() as its_own:
                try:
                    sides[name] = _start(name, shape, options.dtype, home, its_own)
                except SetupError as error:
                    say(f"{name} is left out: {error}")
                    continue
                stack.enter_context(its_own.pop_all())
        for number in range(options.rounds):
            for kind, users in enumerate(shape.users):
                for name in in_turns(list(sides), number):
                    case = f"{name}/{users.name}/{number}"
                    records.begin(case)
                    _measure(sides[name], shape, users, number, kind, partial(records.add, case))
                    records.done(case)
                    say(f"{case} done")


def _start(name: str, shape: LoadShape, dtype: str, home: Path, stack: ExitStack) -> _Side:
    system, model = stack.enter_context(load_system(name, home, shape, dtype))
    servers = stack.enter_context(system.server())
    engine = stack.enter_context(system.engine())
    prompts = LoadRun(system=system, shape=shape, model=model, round=0, add=print).store_prompts(engine)
    side = _Side(system=system, model=model, servers=servers, engine=engine, prompts=prompts)
    for process in (engine, *servers):
        stack.callback(process.resume)  # what is stopped cannot end
        process.pause()
    say(f"{name} is ready")
    return side


def _measure(side: _Side, shape: LoadShape, users: Users, number: int, kind: int, add: Callable[..., None]) -> None:
    load = LoadRun(system=side.system, shape=shape, model=side.model, round=number, add=add)
    with side.awake():
        greet(side.engine)  # what was stopped is slow at first
        load.run_users(users, users.name, side.servers, side.engine, side.prompts, kind)


def main() -> int:
    """Measure and print."""
    options = options_of()
    interrupt_on_signals()
    setup = {"hardware": hardware(), "versions": versions(), "dtype": options.dtype, "turns": options.turns}
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-load-") as home:
            records = Records(options.out, setup, resume=False)
            run(options, records, Path(home))
    except (OSError, SetupError, StartError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything that was started is stopped and removed", file=sys.stderr)
        return 130
    print(f"{setup['hardware']}, {setup['versions']}, {options.dtype}.\n")
    print("\n\n".join(load_tables(records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
