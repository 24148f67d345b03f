"""For all tests."""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvtier.process import prepare_grpc

prepare_grpc()  # as `kvtier-daemon` does, before gRPC is imported

# On a busy machine any example may take long, whatever it does.
settings.register_profile("kvtier", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtier")


@pytest.fixture(autouse=True)
def log_handlers() -> Iterator[None]:
    """A daemon's program run inside a test sets up logging to that test's stderr: the next test is without it."""
    root, ours = logging.getLogger(), logging.getLogger("kvtier")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in list(root.handlers):
        if handler not in handlers and type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(autouse=True)
def restored_mask() -> Iterator[None]:
    """A daemon that runs in the process of a test sets the umask, and the next test would make files by it."""
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Print how a worker of pytest-xdist ended, which says only that it did; a SIGSEGV is -11."""
    if error is not None:
        with suppress(Exception):
            print(f"\n{node.gateway.id}: exit status {node.gateway._io.popen.wait(10)}")
