"""vLLM with kvtier: pinned prompts only, or every prompt."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.daemon import Daemon, run_cli, wait_attached
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.process import Process, wait_until
from benchmarks.systems.system import HOST_GIB, SetupError, System

OFF_DEVICE_CONFIG: Mapping[str, object] = {"gpu_pin": "off"}
"""For kvtier's connector where host memory and disk are measured: keeps pins out of vLLM's prefix cache."""

DISK_PER_HOST_MEMORY = 4
"""The peers' disk has no bound, and kvtier writes compressed packs from half of its own on."""


class KVTier(System):
    """kvtier; the prompt is pinned with the CLI, which returns when it is durable."""

    name = "kvtier"
    has_server = True

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet."""
        super().__init__(home, options, host_gib)
        disk_bytes = {"KVTIER_DISK_BYTES": f"{DISK_PER_HOST_MEMORY * host_gib}GiB"}
        self.daemon = Daemon(home, host_bytes=f"{host_gib}GiB", settings=disk_bytes)

    @property
    def disk_dir(self) -> Path:
        """The daemon's state: packs and ledger."""
        return self.daemon.disk_dir

    @contextmanager
    def server(self) -> Iterator[list[Process]]:
        """Run the daemon."""
        self._num_sessions += 1
        # Not the daemon's own context: leaving that removes the arena's folder for good.
        try:
            self.daemon.start()
            yield [self.daemon]
        finally:
            self.daemon.stop()

    def revive(self, server: Process, engine: Engine) -> None:
        """Start the daemon again; the engine attaches by itself."""
        self.daemon.start()
        wait_attached(self.daemon)

    def evict_prefetched(self, names: Sequence[str]) -> None:
        """Wait until all pins are in host memory, then evict these; the rows keep their pages."""
        wait_until(lambda: "prefetched namespace=" in self.daemon.new_log_text(), 60, "the pins to be in host memory")
        for name in names:
            self._cli("evict", name, "--tier", "host")

    def _engine_options(self) -> EngineOptions:
        return replace(self.options, kvtier_socket=self.daemon.socket)

    def keep(self, engine: Engine, name: str, system: str) -> None:
        """Pin the prompt, after the request that makes the others store it.

        So all systems store the KV of the same computation, and their logprobs can be compared: a pin alone computes a
        shorter prompt, which rounds differently.
        """
        path = self.home / f"{name}.md"
        path.write_text(system)
        self._cli("pin", name, "--system", str(path), "--url", engine.url)

    def _cli(self, command: str, *args: str) -> None:
        done = run_cli(self.daemon.socket, command, *args, timeout_s=600)
        if done.returncode:
            raise SetupError(f"kvtier {command} ended with status {done.returncode}: {done.stdout}{done.stderr}")

    def forget_host_memory(self) -> None:
        """Remove the arena."""
        for path in self.daemon.arena_dir.iterdir() if self.daemon.arena_dir.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def clean_up(self) -> None:
        """Remove the arena and its folder."""
        shutil.rmtree(self.daemon.arena_dir, ignore_errors=True)


class KVTierAll(KVTier):
    """kvtier as a full prefix cache: what is not pinned is kept as well, users' turns included."""

    name = "kvtier, store all"

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet."""
        super().__init__(home, options, host_gib)
        self.daemon.set_variable("KVTIER_CACHE_STORE", "all")
