"""scripts/check_proto_compat.py: what breaks a client of the last release, and what does not."""

import json
from typing import Any

import pytest
from check_proto_compat import RELEASED, broken, promises
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from kvtier._pb import cache_pb2, engine_pb2


def test_what_was_released_is_kept() -> None:
    released = json.loads(RELEASED.read_text())
    assert broken(released, promises(cache_pb2.DESCRIPTOR, engine_pb2.DESCRIPTOR)) == []
    assert released["message PinRequest field 8"] == "ttl_s: optional uint64"
    assert released["message ImportMessage field 1"] == "start: ImportStart in oneof kind"
    assert released["message DaemonStatus.CountersEntry field 2"] == "value: uint64"
    assert released["enum PromptStatus.State value 4"] == "DURABLE"
    assert released["service CacheService call Import"] == "(stream ImportMessage) returns (PromptStatus)"


def file(**changes: Any) -> FileDescriptorProto:
    """Return a small protocol, with another second field if changes are given."""
    proto = FileDescriptorProto(name="t.proto", package="kvtier.v1", syntax="proto3")
    asked = proto.message_type.add(name="Asked")
    asked.field.add(name="name", number=1, type=FieldDescriptor.TYPE_STRING, label=Field.LABEL_OPTIONAL)
    second = {"name": "ttl_s", "number": 2, "type": FieldDescriptor.TYPE_UINT64, "label": Field.LABEL_OPTIONAL}
    asked.field.add(**{**second, **changes})
    kind = proto.enum_type.add(name="Kind")
    kind.value.add(name="ANY", number=0)
    kind.value.add(name="SOME", number=1)
    service = proto.service.add(name="Service")
    service.method.add(name="Ask", input_type=".kvtier.v1.Asked", output_type=".kvtier.v1.Asked")
    return proto


def of(proto: FileDescriptorProto) -> dict[str, str]:
    return promises(descriptor_pool.DescriptorPool().AddSerializedFile(proto.SerializeToString()))


BASE = of(file())


def test_additions_are_fine() -> None:
    grown = file()
    field = grown.message_type[0].field.add(name="labels", number=3, type=FieldDescriptor.TYPE_STRING)
    field.label = Field.LABEL_REPEATED
    grown.enum_type[0].value.add(name="ALL", number=2)
    grown.message_type.add(name="Other")
    grown.service[0].method.add(name="Say", input_type=".kvtier.v1.Other", output_type=".kvtier.v1.Asked")
    assert broken(BASE, of(grown)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "ttl"}, "is `ttl: uint64`"),
        ({"number": 3}, "is gone"),
        ({"type": FieldDescriptor.TYPE_SINT64}, "is `ttl_s: sint64`"),
        ({"label": Field.LABEL_REPEATED}, "is `ttl_s: repeated uint64`"),
    ],
)
def test_a_field_that_changed(changes: dict[str, Any], said: str) -> None:
    (problem,) = broken(BASE, of(file(**changes)))
    assert problem.startswith("message Asked field 2: was `ttl_s: uint64`")
    assert problem.endswith(said)


def test_what_is_removed() -> None:
    shrunk = file()
    del shrunk.message_type[0].field[1], shrunk.enum_type[0].value[1], shrunk.service[0].method[0]
    assert [problem.rpartition(": was")[0] for problem in broken(BASE, of(shrunk))] == [
        "message Asked field 2",
        "enum Kind value 1",
        "service Service call Ask",
    ]


def test_a_call_that_streams_now() -> None:
    changed = file()
    changed.service[0].method[0].server_streaming = True
    (problem,) = broken(BASE, of(changed))
    assert problem.endswith("is `(Asked) returns (stream Asked)`")
