"""A failed end-to-end test shows what daemon and engines have logged: their folders go with them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = """
import sys
from pathlib import Path

import pytest

from benchmarks.harness.process import Process, wait_until
from tests.e2e.harness import ending


def started(folder, text):
    process = Process(text, [sys.executable, "-c", f"print('{text}: the reason')"], {}, folder / "log")
    process.start()
    wait_until(lambda: "reason" in process.log_text(), 60, "it to log")
    return process


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with ending(started(tmp_path_factory.mktemp("module"), "of the module")):
        yield


def test_beside_one_of_the_module(process):
    assert False


def test_with_one_of_its_own(tmp_path):
    with ending(started(tmp_path, "of the test")):
        assert False


def test_that_passes(process):
    pass
"""


def test_a_failure_shows_the_logs_of_the_processes_of_its_module_and_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_that_fails.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.e2e.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}"], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert "2 failed, 1 passed" in done.stdout, done
    shown, _, rest = done.stdout.partition("test_with_one_of_its_own")
    assert "of the module: the reason" in shown
    assert "of the test: the reason" in rest
