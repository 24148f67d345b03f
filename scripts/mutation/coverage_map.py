"""Which fast test runs which line of the product, and how long each takes: from one run of them under coverage."""

import importlib
import os
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

PACKAGES = ("kvtier", "kvtier_connector")
_UNKNOWN_S = 0.2


def record(tree: Path, libraries: Path, folder: Path) -> None:
    """Run the fast tests of a tree under coverage, into `folder`. Ten minutes on two cores.

    Raises:
        subprocess.CalledProcessError: Tests failed: what survives would mean nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coverage.rc").write_text(f"[run]\nsource_pkgs = {','.join(PACKAGES)}\n")
    options = [f"--cov={package}" for package in PACKAGES]
    options += [f"--cov-config={folder / 'coverage.rc'}", "--cov-context=test", "--cov-report=", "--timeout=600"]
    options += ["-p", "pytest_cov", "-n", "2", "-m", "not e2e and not fleet", "--hypothesis-profile=ci", "-q"]
    options += ["-W", "ignore::coverage.exceptions.CoverageWarning"]  # of modules that no process imports
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--junitxml={folder / 'durations.xml'}"],
        cwd=tree,
        env={**environment(tree, libraries), "COVERAGE_FILE": str(folder / "coverage.sqlite")},
        check=True,
    )


def environment(tree: Path, libraries: Path) -> dict[str, str]:
    """Return the environment in which the packages of `tree` are imported, and not those that are installed."""
    paths = (tree, tree / "connector", libraries)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}


class CoverageMap:
    """What `record` left in a folder."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self._database, self._tree = sqlite3.connect(folder / "coverage.sqlite"), tree
        self._contexts = dict(self._database.execute("select id, context from context"))
        self._durations = {
            (case.get("classname"), case.get("name")): float(case.get("time") or 0)
            for case in ElementTree.parse(folder / "durations.xml").iter("testcase")
        }

    @cache  # noqa: B019 - one map lives as long as the program
    def tests_of(self, path: str) -> Mapping[int, frozenset[str]]:
        """Return the ids of the tests that run each line of a module."""
        numbits_to_nums = importlib.import_module("coverage.numbits").numbits_to_nums
        lines: defaultdict[int, set[str]] = defaultdict(set)
        rows = self._database.execute(
            "select context_id, numbits from line_bits join file on file.id = file_id where path = ?",
            (str(self._tree / path),),
        )
        for context_id, numbits in rows:
            if test := self._contexts[context_id].rpartition("|")[0]:  # "" is what imports run
                for line in numbits_to_nums(numbits):
                    lines[line].add(test)
        return {line: frozenset(tests) for line, tests in lines.items()}

    def tests_of_lines(self, path: str, first: int, last: int) -> set[str]:
        """Return the ids of the tests that run any of these lines."""
        lines = self.tests_of(path)
        return {test for line in range(first, last + 1) for test in lines.get(line, ())}

    def seconds(self, test: str) -> float:
        """Return how long a test took."""
        path, _, rest = test.partition("::")
        name, bracket, parameters = rest.partition("[")
        *classes, function = name.split("::")
        module = ".".join([path.removesuffix(".py").replace("/", "."), *classes])
        return self._durations.get((module, function + bracket + parameters), _UNKNOWN_S)
