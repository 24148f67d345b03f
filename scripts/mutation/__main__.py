"""Draws small changes to the product from a seed, and reports which of them the fast tests notice.

usage: make mutants [SEED=1] [PARTS=kvtier/core=17,...]

`PARTS` says how many are drawn from which folder or module; at most one of a line, of lines inside functions that a
test runs. Each runs against the tests that run its lines, the quickest first, until one fails: unit, contract,
property, simulation and fault tests, without those that need a real vLLM. What survives either shows a hole in the
tests or changes nothing that anyone can see; a person has to say which. An hour for a hundred on two cores, and ten
minutes once for each commit, in which all tests run under coverage.
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mutation.coverage_map import CoverageMap, record
from mutation.mutants import Mutant, mutants_of
from mutation.trials import Outcome, Trial, Trials

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".mutants"
PARTS = (
    "kvtier/core=17,kvtier/host=15,kvtier/disk=19,kvtier/tiering=17,kvtier/service=7,kvtier/sessions=8,"
    "connector/kvtier_connector=25"
)


def _sources(tree: Path, part: str) -> list[str]:
    """Return the modules of a part, relative to the tree."""
    top = tree / part
    paths = sorted(top.rglob("*.py")) if top.is_dir() else [top]
    return [str(path.relative_to(tree)) for path in paths]


def draw(tree: Path, covered: CoverageMap, parts: str, seed: int) -> Iterator[Mutant]:
    """Yield mutants of lines that tests run, by turns from no other source of chance than the seed."""
    chance = random.Random(seed)
    for part in parts.split(","):
        name, _, count = part.partition("=")
        found = [
            mutant
            for path in _sources(tree, name)
            for mutant in mutants_of(path, (tree / path).read_text())
            if covered.tests_of_lines(path, mutant.line, mutant.end_line)
        ]
        chance.shuffle(found)
        of_lines: dict[tuple[str, int], Mutant] = {}
        for mutant in found:
            of_lines.setdefault((mutant.path, mutant.line), mutant)
        yield from list(of_lines.values())[: int(count)]


def _copy_of(commit: str, name: str) -> Path:
    """Return a clone of the repository at this commit, with the environment of this one."""
    tree = FOLDER / name
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        (tree / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run(["git", "fetch", "--quiet", "origin", commit], cwd=tree, check=True)
    subprocess.run(["git", "checkout", "--quiet", "--force", commit], cwd=tree, check=True)
    return tree


def _line(tree: Path, trial: Trial) -> str:
    mutant = trial.mutant
    text = (tree / mutant.path).read_text().splitlines()[mutant.line - 1].strip()
    tests = trial.killed_by or f"{trial.num_tests}{' of more' if trial.is_cut else ''} tests"
    place = f"{trial.outcome.value:8}  {mutant.path}:{mutant.line}  {mutant.kind}"
    return f"{place}\n{'':10}{text}  ->  {mutant.new}\n{'':10}{tests}"


def main() -> int:
    """Draw, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default=PARTS, help="FOLDER=COUNT,... (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--cap-s", type=float, default=60, help="seconds of tests for one mutant")
    parser.add_argument("--libraries", type=Path, required=True, help="folder with coverage and pytest-cov")
    options = parser.parse_args()
    sys.path.append(str(options.libraries))
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    covered_tree, map_folder = _copy_of(commit, "covered"), FOLDER / f"map-{commit[:12]}"
    if not (map_folder / "durations.xml").exists():
        record(covered_tree, options.libraries, map_folder)
    covered = CoverageMap(map_folder, covered_tree)
    mutants = list(draw(covered_tree, covered, options.parts, options.seed))
    trees = [_copy_of(commit, f"trial-{number}") for number in range(options.jobs)]
    counts: Counter[Outcome] = Counter()
    with (FOLDER / f"seed-{options.seed}-{commit[:12]}.jsonl").open("w") as out:
        for trial in Trials(trees, options.libraries, covered, options.cap_s).run(mutants):
            counts[trial.outcome] += 1
            print(_line(covered_tree, trial), flush=True)
            outcome = {"outcome": trial.outcome.value, "killed_by": trial.killed_by}
            print(json.dumps({**asdict(trial.mutant), **outcome}), file=out, flush=True)
    num_killed = counts[Outcome.KILLED] + counts[Outcome.HUNG]
    print(f"{commit[:12]}, seed {options.seed}: {num_killed} of {len(mutants)} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
