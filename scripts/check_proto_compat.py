"""Fails when proto/kvtier/v1 breaks what clients of the last release rely on; runs in `make check`.

Messages, fields, enums and calls of a release stay: with their names, numbers, types, and whether a field repeats or
can be absent. New ones may be added. `--record`, at a release, writes what the next one is compared with.

It guards older clients at a newer daemon. A newer engine at an older daemon is for the daemon to bear: that skips kinds
of `EngineMessage`, and fields, that it does not know. What an engine has to be answered needs a field of `Welcome`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from kvtier._pb import cache_pb2, engine_pb2

RELEASED = Path(__file__).parents[1] / "proto" / "kvtier" / "v1" / "released.json"
_TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}

Promises = dict[str, str]
"""What is promised, one line each: `message PinRequest field 8` -> `ttl_s: optional uint64`."""


def promises(*files: FileDescriptor) -> Promises:
    """Return what the files promise."""
    found: Promises = {}
    for file in files:
        for message in file.message_types_by_name.values():
            found |= dict(_of_message(message))
        for enum in file.enum_types_by_name.values():
            found |= dict(_of_enum(enum))
        for service in file.services_by_name.values():
            for call in service.methods:
                request = f"{'stream ' if call.client_streaming else ''}{_name(call.input_type)}"
                answer = f"{'stream ' if call.server_streaming else ''}{_name(call.output_type)}"
                found[f"service {service.name} call {call.name}"] = f"({request}) returns ({answer})"
    return found


def broken(released: Promises, now: Promises) -> list[str]:
    """Return what was promised and is not so any longer, one line each."""
    changed = [promise for promise, meaning in released.items() if now.get(promise) != meaning]
    return [f"{promise}: was `{released[promise]}`, is {_shown(now.get(promise))}" for promise in changed]


def _shown(meaning: str | None) -> str:
    return "gone" if meaning is None else f"`{meaning}`"


def _of_message(message: Descriptor) -> Iterator[tuple[str, str]]:
    yield f"message {_name(message)}", "exists"
    for field in message.fields:
        yield f"message {_name(message)} field {field.number}", f"{field.name}: {_type(field)}"
    for nested in message.nested_types:
        yield from _of_message(nested)
    for enum in message.enum_types:
        yield from _of_enum(enum)


def _of_enum(enum: EnumDescriptor) -> Iterator[tuple[str, str]]:
    for value in enum.values:
        yield f"enum {_name(enum)} value {value.number}", value.name


def _type(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    name = _name(kind) if kind else _TYPES[field.type]
    if field.is_repeated:
        return f"repeated {name}"
    oneof = field.containing_oneof
    if oneof is None:
        return name
    # protoc makes a oneof of its own, with an underscore, for each field that is `optional`.
    return f"optional {name}" if oneof.name.startswith("_") else f"{name} in oneof {oneof.name}"


def _name(described: Any) -> str:
    return str(described.full_name).removeprefix("kvtier.v1.")


def main() -> int:
    now = promises(cache_pb2.DESCRIPTOR, engine_pb2.DESCRIPTOR)
    if sys.argv[1:] == ["--record"]:
        RELEASED.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    problems = broken(json.loads(RELEASED.read_text()), now)
    for problem in problems:
        print(f"proto/kvtier/v1: {problem}", file=sys.stderr)
    if problems:
        print(
            "clients of the last release rely on this: add a field or a call instead (docs/python.md)", file=sys.stderr
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
