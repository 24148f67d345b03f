"""An adapter of LMCache in a process of LMCache's environment, from this side."""

import contextlib
import json
import os
import pickle
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.systems.system import PEER_VENVS

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[2]


class ObjectId(NamedTuple):
    """What the driver makes a key of."""

    name: int
    model: str = "org/model"
    salt: str = ""


class AdapterProcess:
    """Calls of `AdapterDriver`, over pipes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def store(self, objects: Mapping[ObjectId, bytes]) -> bool:
        """See `AdapterDriver`."""
        return bool(self._call("store", objects))

    def lookup(self, ids: Sequence[ObjectId], object_bytes: int) -> list[int]:
        """See `AdapterDriver`."""
        found: list[int] = self._call("lookup", ids, object_bytes)
        return found

    def load(self, ids: Sequence[ObjectId], object_bytes: int) -> dict[int, bytes]:
        """See `AdapterDriver`."""
        loaded: dict[int, bytes] = self._call("load", ids, object_bytes)
        return loaded

    def usage(self) -> tuple[int, dict[str, int]]:
        """See `AdapterDriver`."""
        usage: tuple[int, dict[str, int]] = self._call("usage")
        return usage

    def status(self) -> dict[str, Any]:
        """See `AdapterDriver`."""
        status: dict[str, Any] = self._call("status")
        return status

    def _call(self, name: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((name, args), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


def lmcache_environment() -> dict[str, str]:
    """The environment of LMCache's processes, in which this kvtier is found."""
    settings = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'connector'}",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "DO_NOT_TRACK": "1",
    }
    return os.environ | settings


@contextlib.contextmanager
def adapter(spec: Mapping[str, Any], log: Path) -> Iterator[AdapterProcess]:
    """Make an adapter from its JSON, by LMCache's own factory, until the block ends; it must end well."""
    command = [str(PEER_VENVS / "lmcache" / "bin" / "python"), "-m", "tests.lmcache.adapter_driver", json.dumps(spec)]
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=lmcache_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
        )
    try:
        yield AdapterProcess(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def kvtier_spec(socket: Path, **params: Any) -> dict[str, Any]:
    """What users give LMCache."""
    return {
        "type": "plugin",
        "module_path": "kvtier_lmcache",
        "class_name": "KVTierL2Adapter",
        "adapter_params": {"socket": str(socket), **params},
    }
