"""Runs a program whose wall clock is ahead by the seconds that a file says; a test may change them at any time.

    SHIFTED_CLOCK=FILE python -m tests.fakes.shifted_clock MODULE [arguments]

What the program reads by `time.time` is shifted, and the time that moto's store gives to objects. Monotonic time is
not, nor is the clock by which an S3 client signs its requests.
"""

import os
import runpy
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

VARIABLE = "SHIFTED_CLOCK"
_time = time.time


def set_shift(file: Path, seconds: float) -> None:
    """Set the clock that is read from a file."""
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)


def main() -> None:
    """Run the module that the arguments name."""
    file = Path(os.environ[VARIABLE])

    def shift_s() -> float:
        return float(file.read_text())

    time.time = lambda: _time() + shift_s()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "tests.fakes.moto_server":
        _shift_moto(shift_s)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _shift_moto(shift_s: Callable[[], float]) -> None:
    from moto.core import utils

    now = utils.utcnow

    def shifted() -> datetime:
        return now() + timedelta(seconds=shift_s())

    utils.utcnow = shifted  # before moto's stores take it from there


if __name__ == "__main__":
    main()
