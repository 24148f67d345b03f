"""Hosts of a fleet as real daemons: each with folders, a clock and a way to the store of its own."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.daemon import Daemon
from kvtier import Client
from kvtier.config import DaemonConfig, DiskConfig, HostConfig, ServerConfig
from kvtier.library.values.public_values import Prompt
from tests.fakes.fault_proxy import FaultProxy, fault_proxy
from tests.fakes.s3_server import CREDENTIALS
from tests.fakes.shifted_clock import VARIABLE, set_shift

HOST_BYTES, DISK_BYTES = 64 * 1024**2, 1024**3
CONVERGED_S = 60.0
"""More than the longest pause before a host tries the store again."""


class ShiftedDaemon(Daemon):
    """A daemon whose wall clock a test sets."""

    command = (sys.executable, "-m", "tests.fakes.shifted_clock", "kvtier.daemon.main")


class Pinned(NamedTuple):
    """A pin as a host shows it. `num_tokens` names its content in these tests."""

    num_tokens: int
    priority: int
    labels: tuple[tuple[str, str], ...]


@dataclass
class FleetDaemon:
    """One host."""

    name: str
    daemon: ShiftedDaemon
    proxy: FaultProxy
    client: Client
    clock: Path

    def pins(self) -> dict[str, Pinned]:
        """Return what is pinned here, by name; a replacement under way counts as what it is to replace."""
        prompts = {each.name: each for each in self.client.list() if each.pinned}
        named = {name: prompt for name, prompt in prompts.items() if prompt.origin == "named"}
        return {name: _pinned(prompts.get(prompt.replacement, prompt)) for name, prompt in named.items()}

    def kill(self) -> None:
        """kill -9."""
        self.daemon.kill()

    def lose_everything(self) -> None:
        """Be a host that is new: nothing of what the ended daemon had in memory or on disk is there."""
        self.daemon.lose_memory()
        shutil.rmtree(self.daemon.disk_dir)

    def start(self) -> None:
        """Start the daemon again, on what is there."""
        self.daemon.start()

    @property
    def config(self) -> DaemonConfig:
        """What a scripted engine needs to attach."""
        return DaemonConfig(
            server=ServerConfig(socket=self.daemon.socket),
            host=HostConfig(host_bytes=HOST_BYTES, arena_dir=self.daemon.arena_dir),
            disk=DiskConfig(disk_bytes=DISK_BYTES, disk_dir=self.daemon.disk_dir),
        )

    def set_clock(self, ahead_s: float) -> None:
        """Set this host's clock."""
        set_shift(self.clock, ahead_s)


@contextmanager
def fleet_daemons(folder: Path, server_url: str, clocks_s: Sequence[float]) -> Iterator[list[FleetDaemon]]:
    """Run a host for each clock, behind a proxy each, to the bucket `fleet` of an S3 server."""
    with ExitStack() as stack:
        hosts = []
        for number, ahead_s in enumerate(clocks_s):
            name = "abcdef"[number]
            home = folder / name
            home.mkdir(mode=0o700)
            proxy = stack.enter_context(fault_proxy(server_url))
            settings = CREDENTIALS | {
                "KVTIER_REMOTE_URL": "s3://fleet/hosts",
                "KVTIER_REMOTE_POLL": "1s",
                "KVTIER_REMOTE_GRACE": "10m",
                "KVTIER_DISK_BYTES": str(DISK_BYTES),
                "AWS_ENDPOINT_URL": proxy.url,
                VARIABLE: str(home / "clock"),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
            }
            set_shift(home / "clock", ahead_s)
            daemon = ShiftedDaemon(home, host_bytes=str(HOST_BYTES), settings=settings)
            stack.enter_context(daemon)
            client = stack.enter_context(Client(daemon.socket))
            hosts.append(FleetDaemon(name, daemon, proxy, client, home / "clock"))
        yield hosts


def wait_converged(hosts: Sequence[FleetDaemon]) -> dict[str, Pinned]:
    """Wait until all hosts and the store say the same, and return that; AssertionError says how they differ."""
    problem, deadline_s = "", time.monotonic() + CONVERGED_S
    while time.monotonic() < deadline_s:
        if not (problem := _difference(hosts)):
            return hosts[0].pins()
        time.sleep(0.2)
    rows = [f"{host.name} {prompt}" for host in hosts for prompt in host.client.list()]
    logs = [host.daemon.log_tail(100) for host in hosts]
    raise AssertionError("\n".join([problem, *rows, *logs]))


def _difference(hosts: Sequence[FleetDaemon]) -> str:
    views = [host.pins() for host in hosts]
    for host, view in zip(hosts, views, strict=True):
        status = host.client.remote()
        if status.problem or status.refused or status.num_waiting_pins:
            return f"{host.name}: {status}"
        if view != views[0]:
            return f"{hosts[0].name} and {host.name} differ: {set(views[0].items()) ^ set(view.items())}"
        if status.num_pins != len(view):
            return f"{host.name} has {len(view)} pins and knows {status.num_pins} in the store"
    return ""


def _pinned(prompt: Prompt) -> Pinned:
    return Pinned(prompt.num_tokens, prompt.priority, tuple(sorted(prompt.labels.items())))


def eventually(condition: Callable[[], bool]) -> None:
    """Return when a condition holds, within the time that a fleet has to agree."""
    deadline_s = time.monotonic() + CONVERGED_S
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.1)
