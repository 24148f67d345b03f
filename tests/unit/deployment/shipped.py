"""The files under configs/, and what in the code their words must agree with."""

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from typer.testing import CliRunner

from kvtier.cli.app import app
from kvtier.config import DaemonConfig
from kvtier.config.load import load_config
from kvtier.config.settings import KEYS, variable_of
from kvtier.config.units import parse_size

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
README_TRANSFER_CONFIG = re.search(r"--kv-transfer-config '(\{.*?\})'", (ROOT / "README.md").read_text(), re.DOTALL)
_KNOWN_VARIABLES = {variable_of(key) for key in KEYS} | {"KVTIER_CONFIG", "KVTIER_VLLM_URL"}

Mounts = Mapping[PurePosixPath, str]
"""What is mounted in a container, by path."""


def config_of(environment: Mapping[str, str], path: Path | None = None) -> DaemonConfig:
    """Return what the daemon would read; raises ConfigError for what it would refuse."""
    strange = {name for name in environment if name.startswith("KVTIER_")} - _KNOWN_VARIABLES
    assert not strange, f"no such variables: {strange}"
    return load_config(path=path, environ=environment).config


def assert_shared(config: DaemonConfig, mounts: Mounts, other: Mounts) -> None:
    """Check that an engine's container has socket and arenas of the daemon's, under the same paths.

    Args:
        config: The daemon's.
        mounts: Of the daemon's container.
        other: Of the engine's.
    """
    for path in (config.server.socket.parent, config.host.arena_dir):
        place = PurePosixPath(path)
        assert mounts[place] == other[place], f"{place} is not the same in both"
    assert PurePosixPath(config.disk.disk_dir) in mounts, "packs and ledger would go with the container"


def assert_transfer_config(arguments: list[str]) -> None:
    """Check that vLLM gets the connector as the README names it."""
    assert README_TRANSFER_CONFIG is not None
    given: Any = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert given == json.loads(README_TRANSFER_CONFIG[1])
    assert "--enable-prompt-tokens-details" in arguments, "without it no answer says what came from a cache"


def memory_bytes(text: str) -> int:
    """Return the bytes of docker's "20g" or Kubernetes' "20Gi"."""
    return parse_size(re.sub(r"(?<=\d)([kmgt])i?$", lambda match: f"{match[1]}iB", text, flags=re.IGNORECASE))


def assert_probe(command: list[str]) -> None:
    """Check that a probe is a command of ours, which fails, and not for wrong usage, when no daemon answers."""
    assert command[0] == "kvtier"
    result = CliRunner().invoke(app, command[1:], env={"KVTIER_SOCKET": "/nonexistent/kvtier.sock"})
    assert result.exit_code == 3, result.output
    assert result.stdout == ""
