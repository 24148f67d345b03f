"""All targets by name."""

from collections.abc import Callable

from tests.fuzz.base import Target
from tests.fuzz.file_targets import FILE_TARGETS
from tests.fuzz.http_target import HttpTarget
from tests.fuzz.rpc_target import RpcTarget
from tests.fuzz.text_targets import TomlTarget, YamlTarget

TARGETS: dict[str, Callable[[], Target]] = {
    kind.name: kind for kind in (*FILE_TARGETS, TomlTarget, YamlTarget, RpcTarget, HttpTarget)
}


def target_of(name: str) -> Target:
    """Make a target ready."""
    return TARGETS[name]()
