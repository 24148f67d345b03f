"""Values have every field of their messages, and a newer daemon's words become UNKNOWN."""

from dataclasses import fields
from enum import StrEnum
from typing import Any

import pytest
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from kvtier._pb import cache_pb2 as pb
from kvtier.library.values import grant_values as grants
from kvtier.library.values import outcome_values as outcomes
from kvtier.library.values import proof_values as proofs
from kvtier.library.values import public_values as values
from kvtier.library.values import remote_values as remotes
from kvtier.library.values.conversion import from_message, prompt_of
from tests.unit.cli import hostile

PAIRS: dict[type[Any], type[Message]] = {
    values.Prompt: pb.PromptStatus,
    values.Binding: pb.PromptBinding,
    values.PinUse: pb.PinUse,
    values.ChunkMap: pb.ChunkMap,
    values.Evicted: pb.EvictResponse,
    values.DaemonStatus: pb.DaemonStatus,
    values.Tier: pb.TierStatus,
    values.KeyUsage: pb.KeyUsage,
    values.EngineStatus: pb.SessionStatus,
    values.Namespace: pb.NamespaceStatus,
    values.Advice: pb.Advice,
    values.NamespaceAdvice: pb.NamespaceAdvice,
    values.AdvisedPrefix: pb.AdvisedPrefix,
    values.ChangingPlace: pb.ChangingPlace,
    values.FsckReport: pb.FsckReport,
    values.FsckFinding: pb.FsckFinding,
    proofs.VerifyReport: pb.VerifyReport,
    proofs.VerifiedNamespace: pb.VerifiedNamespace,
    proofs.VerifiedTier: pb.VerifiedTier,
    proofs.Readiness: pb.Readiness,
    proofs.WaitingPrompt: pb.WaitingPrompt,
    proofs.Event: pb.Event,
}
PAIRS |= {
    outcomes.PinUsage: pb.PinUsage,
    outcomes.OutcomeCount: pb.OutcomeCount,
    outcomes.Explanation: pb.Explanation,
    outcomes.NearPrompt: pb.NearPrompt,
    outcomes.NearBinding: pb.NearBinding,
    outcomes.MissingChunks: pb.MissingChunks,
    outcomes.RecentRequest: pb.RecentRequest,
}
PAIRS |= {
    remotes.RemoteStatus: pb.RemoteStatus,
    remotes.RefusedSharedPin: pb.RefusedSharedPin,
    remotes.RemoteSpending: pb.RemoteSpending,
    remotes.RemoteHost: pb.RemoteHost,
}
PAIRS |= {grants.Grant: pb.Grant, grants.CreatedGrant: pb.CreatedGrant}
ENUMS: dict[type[StrEnum], tuple[EnumDescriptor, str]] = {
    values.PromptState: (pb.PromptStatus.State.DESCRIPTOR, "STATE_UNSPECIFIED"),
    values.Verdict: (pb.AdvisedPrefix.Verdict.DESCRIPTOR, "VERDICT_UNSPECIFIED"),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_value_has_the_fields_of_its_message_in_their_order(kind: type[Any]) -> None:
    """A field that was added to the protocol and is missing here: add a line to public_values.py."""
    declared = [field.name for field in PAIRS[kind].DESCRIPTOR.fields]
    assert [field.name for field in fields(kind)] == [name.removesuffix("_json") for name in declared]


@pytest.mark.parametrize("kind", PAIRS)
def test_every_field_is_read(kind: type[Any]) -> None:
    message = hostile.fill(PAIRS[kind](), "text", 2.5)
    value = from_message(kind, message)
    empty = from_message(kind, PAIRS[kind]())
    assert [field.name for field in fields(kind) if getattr(value, field.name) == getattr(empty, field.name)] == []
    assert from_message(kind, message) == value


@pytest.mark.parametrize("kind", ENUMS)
def test_an_enum_has_the_words_of_the_protocol(kind: type[StrEnum]) -> None:
    declared, unspecified = ENUMS[kind]
    assert [member.name for member in kind] == [v.name for v in declared.values if v.name != unspecified] + ["UNKNOWN"]
    assert all(member.value == member.name.lower() for member in kind)


@pytest.mark.parametrize("number", [0, 99])
def test_a_state_of_a_newer_daemon(number: int) -> None:
    status = pb.PromptStatus(state=number)  # type: ignore[arg-type]
    assert prompt_of(status).state is values.PromptState.UNKNOWN


@pytest.mark.parametrize(("text", "recipe"), [("", None), ('{"kind": "text"}', {"kind": "text"}), ("{half", "{half")])
def test_a_recipe_is_parsed_where_it_can_be(text: str, recipe: object) -> None:
    assert prompt_of(pb.PromptStatus(recipe_json=text)).recipe == recipe


def test_a_log_line_of_a_prompt_has_neither_its_text_nor_its_salt() -> None:
    texts = dict.fromkeys(("before", "in_request", "in_prompt"), "SECRET")
    difference = outcomes.Difference(name="b", looks_like=outcomes.ChangeLooksLike.TEXT, **texts)
    assert "SECRET" not in repr(difference), "two of its texts were shown"
    shown = repr(prompt_of(pb.PromptStatus(recipe_json='"SECRET"', cache_salt="SECRET", name="bot")))
    assert "bot" in shown
    assert "SECRET" not in shown
