"""What the CLI may rely on: CacheService as `proto/kvtier/v1/cache.proto` says it, of prompts and their errors."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest

from kvtier._pb import cache_pb2, engine_pb2
from kvtier.client.address import ERROR_NAME_KEY
from tests.fakes.operator import Stub, apply, evict, pin, prompt_of, status_of, unpin, until, update

Code = grpc.StatusCode
Cause = cache_pb2.MissingChunks.Cause
State = cache_pb2.PromptStatus


class Engine(Protocol):
    """An attached engine."""

    async def bind(self, name: str) -> None:
        """Bind a prompt that was pinned since it attached."""

    async def refuse(self, name: str, error: str) -> None:
        """Answer that it cannot use a prompt that was pinned since it attached."""

    async def store(self, name: str, num_chunks: int) -> None:
        """Store the first chunks of a bound prompt, and wait until they are durable."""

    async def report(self, *requests: engine_pb2.RequestEnded) -> None:
        """Report requests that ended, and wait until the daemon has counted them."""


class Subject(Protocol):
    """The daemon under test, and an engine of it.

    Attributes:
        stub: Of an operator.
    """

    stub: Stub

    def engine(self) -> AbstractAsyncContextManager[Engine]:
        """Attach an engine."""


Open = Callable[[Path], AbstractAsyncContextManager[Subject]]
Play = Callable[[Callable[[Subject], Coroutine[Any, Any, None]]], None]


@asynccontextmanager
async def refused(code: Code, error: str) -> AsyncIterator[None]:
    """Check that a call is refused, with the class of the error that the client raises again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value
    metadata: Any = caught.value.trailing_metadata()
    assert dict(metadata)[ERROR_NAME_KEY] == error
    assert caught.value.details()


async def listed(stub: Stub) -> list[cache_pb2.PromptStatus]:
    """Return the prompts by name."""
    answer = await stub.ListPrompts(cache_pb2.ListPromptsRequest())
    return sorted(answer.prompts, key=lambda prompt: str(prompt.name))


class CacheServiceContract:
    """Subclasses give `opened`."""

    @pytest.fixture
    def opened(self) -> Open:
        raise NotImplementedError

    @pytest.fixture
    def play(self, opened: Open, tmp_path: Path) -> Play:
        """Run a scenario beside a daemon."""

        def run(scenario: Callable[[Subject], Coroutine[Any, Any, None]]) -> None:
            async def played() -> None:
                async with opened(tmp_path) as daemon:
                    await scenario(daemon)

            asyncio.run(played())

        return run

    def test_a_pin_is_recorded_listed_and_counted(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "p", tokens=40, model="m", cache_salt="s", ttl_s=1000, priority=3)
            prompt = await prompt_of(daemon.stub)
            assert (prompt.name, prompt.pinned, prompt.num_tokens) == ("p", True, 40)
            assert (prompt.model, prompt.cache_salt, prompt.priority) == ("m", "s", 3)
            assert prompt.state == State.WAITING
            assert prompt.pin_id
            assert prompt.tokens_digest
            assert 0 < prompt.expires_unix_s - time.time() <= 1000
            await pin(daemon.stub, "q")
            listed = (await daemon.stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
            assert sorted(each.name for each in listed) == ["p", "q"]
            assert not (await prompt_of(daemon.stub, "q")).expires_unix_s
            assert (await status_of(daemon.stub)).num_prompts == 2

        play(scenario)

    def test_the_tokens_come_back(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "p", tokens=40, first=7)
            answer = await daemon.stub.GetTokens(cache_pb2.GetTokensRequest(name="p"))
            assert list(answer.tokens) == list(range(7, 47))

        play(scenario)

    def test_a_map_says_where_each_chunk_lies(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "early", tokens=48)
            async with refused(Code.FAILED_PRECONDITION, "PromptNotBoundError"):
                await daemon.stub.GetChunkMap(cache_pb2.GetChunkMapRequest(name="early"))
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=70)
                await engine.bind("p")
                await engine.store("p", 2)
                answer = await daemon.stub.GetChunkMap(cache_pb2.GetChunkMapRequest(name="p"))
                binding = (await prompt_of(daemon.stub)).bindings[0]
                assert (answer.name, answer.namespace_id) == ("p", binding.namespace_id)
                assert answer.covered_tokens == binding.covered_tokens
                assert len(answer.chunks) == binding.num_chunks > 2
                assert answer.chunks == b"\3\3" + bytes(binding.num_chunks - 2)
                named = cache_pb2.GetChunkMapRequest(name="p", namespace_id=binding.namespace_id)
                assert await daemon.stub.GetChunkMap(named) == answer
                async with refused(Code.FAILED_PRECONDITION, "PromptNotBoundError"):
                    await daemon.stub.GetChunkMap(cache_pb2.GetChunkMapRequest(name="p", namespace_id="f" * 64))
                async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                    await daemon.stub.GetChunkMap(cache_pb2.GetChunkMapRequest(name="q"))

        play(scenario)

    def test_a_pin_without_tokens_is_not_rendered_yet(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "p", tokens=0, recipe_json="{}")
            assert (await prompt_of(daemon.stub)).state == State.UNRENDERED
            async with refused(Code.FAILED_PRECONDITION, "PromptUnrenderedError"):
                await daemon.stub.GetTokens(cache_pb2.GetTokensRequest(name="p"))
            created_unix_s = (await prompt_of(daemon.stub)).created_unix_s
            await pin(daemon.stub, "p", tokens=40)
            prompt = await prompt_of(daemon.stub)
            assert (prompt.num_tokens, prompt.created_unix_s) == (40, created_unix_s)

        play(scenario)

    def test_what_an_engine_cannot_use_is_refused(self, play: Play) -> None:
        """It had the state of a prompt that waits: only a person who read `error` knew better."""

        async def scenario(daemon: Subject) -> None:
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=7)
                await engine.refuse("p", "it is shorter than a chunk")
                prompt = await prompt_of(daemon.stub)
                assert (prompt.state, prompt.error) == (State.REFUSED, "it is shorter than a chunk")
                ready = await daemon.stub.CheckReady(cache_pb2.ReadyRequest(names=["p"]))
                assert [each.state for each in ready.waiting] == [State.REFUSED]
                assert "it is shorter than a chunk" in ready.waiting[0].why

        play(scenario)

    def test_other_tokens_under_a_name_need_replace(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "p", tokens=40)
            await pin(daemon.stub, "p", tokens=40)
            for changed in ({"tokens": 41}, {"first": 1}):
                async with refused(Code.ALREADY_EXISTS, "PromptExistsError"):
                    await pin(daemon.stub, "p", **{"tokens": 40} | changed)
            await pin(daemon.stub, "p", tokens=41, replace=True)
            assert (await prompt_of(daemon.stub)).num_tokens == 41

        play(scenario)

    def test_what_is_not_given_again_stays(self, play: Play) -> None:
        """Pinned again without a TTL, or with other tokens, it never ended, and lost its priority."""

        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "p", tokens=40, ttl_s=1000, priority=3, public=True)
            first = await prompt_of(daemon.stub)
            for again in ({}, {"tokens": 41, "replace": True}):
                await pin(daemon.stub, "p", **{"tokens": 40} | again)
                prompt = await prompt_of(daemon.stub)
                assert (prompt.priority, prompt.public) == (3, True)
                assert prompt.expires_unix_s == pytest.approx(first.expires_unix_s, abs=2)
            await pin(daemon.stub, "p", tokens=41, ttl_s=0, priority=0, public=False)
            prompt = await prompt_of(daemon.stub)
            assert (prompt.expires_unix_s, prompt.priority, prompt.public) == (0, 0, False)
            await pin(daemon.stub, "p", tokens=41, ttl_s=1000, priority=3)
            await unpin(daemon.stub, "p")
            await pin(daemon.stub, "p", tokens=41)
            prompt = await prompt_of(daemon.stub)
            assert (prompt.expires_unix_s, prompt.priority) == (0, 0), "a pin that had ended is a new one"

        play(scenario)

    def test_how_a_prompt_is_pinned_can_be_changed(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "p", tokens=40, ttl_s=1000)
            pin_id = (await prompt_of(daemon.stub)).pin_id
            await update(daemon.stub, "p", priority=-5)
            await update(daemon.stub, "p", public=True)
            prompt = await update(daemon.stub, "p", ttl_s=50)
            assert (prompt.priority, prompt.public, prompt.pin_id, prompt.num_tokens) == (-5, True, pin_id, 40)
            assert 0 < prompt.expires_unix_s - time.time() <= 50
            assert not (await update(daemon.stub, "p", ttl_s=0)).expires_unix_s
            await pin(daemon.stub, "salted", tokens=40, cache_salt="s")
            for name, how in (("salted", {"public": True}), ("p", {})):
                async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                    await update(daemon.stub, name, **how)
            await unpin(daemon.stub, "p")
            async with refused(Code.FAILED_PRECONDITION, "PromptNotPinnedError"):
                await update(daemon.stub, "p", priority=1)

        play(scenario)

    def test_a_name_with_a_space_is_refused(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                await pin(daemon.stub, "a b")
            assert not (await daemon.stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts

        play(scenario)

    def test_an_unknown_name_is_refused_by_every_call(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            async def watched() -> None:
                await anext(aiter(daemon.stub.WatchPrompt(cache_pb2.GetPromptRequest(name="p"))))

            async def tokens() -> None:
                await daemon.stub.GetTokens(cache_pb2.GetTokensRequest(name="p"))

            calls = (
                lambda: prompt_of(daemon.stub),
                lambda: unpin(daemon.stub),
                lambda: evict(daemon.stub),
                lambda: update(daemon.stub, priority=1),
            )
            for call in (*calls, tokens, watched):
                async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                    await call()

        play(scenario)

    def test_a_promise_ends_before_the_name_does(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub)
            async with refused(Code.FAILED_PRECONDITION, "PromptPinnedError"):
                await evict(daemon.stub)
            await evict(daemon.stub, force=True)
            assert (await prompt_of(daemon.stub)).pinned, "the chunks went, the promise stands"
            await unpin(daemon.stub)
            assert not (await prompt_of(daemon.stub)).pinned
            await evict(daemon.stub, tier=cache_pb2.TIER_HOST)
            await prompt_of(daemon.stub)  # only memory was emptied
            await evict(daemon.stub)
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await prompt_of(daemon.stub)

        play(scenario)

    def test_a_watch_yields_every_state_until_the_prompt_is_durable(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=3 * 16 + 5)
                call = daemon.stub.WatchPrompt(cache_pb2.GetPromptRequest(name="p"))
                watch = aiter(call)
                seen = [await anext(watch)]
                await engine.bind("p")
                await engine.store("p", 1)
                await engine.store("p", 3)
                while seen[-1].state != State.DURABLE:
                    seen.append(await asyncio.wait_for(anext(watch), 30))
                call.cancel()
                assert {each.state for each in seen} <= {State.WAITING, State.CAPTURING, State.DURABLE}
                (binding,) = (await prompt_of(daemon.stub)).bindings
                assert (binding.num_chunks, binding.covered_tokens, binding.live) == (3, 48, True)
                assert binding.num_durable_chunks == binding.num_host_chunks == 3
                assert binding.raw_bytes == binding.durable_raw_bytes > 0
                assert 0 < binding.disk_share_bytes <= binding.disk_bytes

        play(scenario)

    def test_a_durable_pin_serves_until_its_replacement_is_durable(self, play: Play) -> None:
        """It was deleted at once: until vLLM had computed the new one, requests with either were misses."""

        async def scenario(daemon: Subject) -> None:
            async with daemon.engine() as engine:
                first = await pin(daemon.stub, "p", tokens=48)
                await engine.bind("p")
                await engine.store("p", 3)
                second = await pin(daemon.stub, "p", tokens=64, replace=True, priority=2)
                assert (await prompt_of(daemon.stub, "p@2")).pin_id == second
                assert (await prompt_of(daemon.stub, "p@2")).origin == "replacement"
                standing = await prompt_of(daemon.stub)
                assert (standing.pin_id, standing.pinned, standing.replacement) == (first, True, "p@2")
                await engine.bind("p@2")
                await engine.store("p@2", 4)
                async with asyncio.timeout(30):
                    while (await prompt_of(daemon.stub)).pin_id != second:  # noqa: ASYNC110 - in another process
                        await asyncio.sleep(0.05)
                now, before = await prompt_of(daemon.stub), await prompt_of(daemon.stub, "p@1")
                assert (now.num_tokens, now.pinned, now.priority, now.replacement) == (64, True, 2, "")
                assert (before.num_tokens, before.pinned, before.pin_id) == (48, False, first)
                by_id = await daemon.stub.GetPrompt(cache_pb2.GetPromptRequest(pin_id=first))
                assert by_id.name == "p@1"
                third = await daemon.stub.Pin(cache_pb2.PinRequest(name="p", version=1, replace=True))
                assert (third.name, third.num_tokens) == ("p@3", 48)

        play(scenario)

    def test_engines_and_what_they_confirmed_are_counted(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "early")
            early = await prompt_of(daemon.stub, "early")
            assert (early.num_engines, early.num_confirmed) == (0, 0)
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=48)
                await engine.bind("p")
                prompt = await prompt_of(daemon.stub)
                assert (prompt.num_engines, prompt.num_confirmed) == (1, 1)
                assert prompt.state == State.CAPTURING

        play(scenario)

    def test_owner_labels_and_a_sliding_ttl_are_kept_until_they_are_changed(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            labels = cache_pb2.Labels(values={"team": "support", "tier": "1"})
            await pin(daemon.stub, ttl_s=600, sliding=True, owner="support", labels=labels)
            await pin(daemon.stub, priority=2)
            prompt = await prompt_of(daemon.stub)
            assert (prompt.owner, dict(prompt.labels)) == ("support", dict(labels.values))
            assert (prompt.ttl_s, prompt.sliding, prompt.priority) == (600, True, 2)
            prompt = await update(daemon.stub, set_labels={"tier": "2", "env": ""}, removed_labels=["team", "none"])
            assert dict(prompt.labels) == {"tier": "2", "env": ""}
            prompt = await update(daemon.stub, owner="sales", sliding=False)
            assert (prompt.owner, prompt.sliding, prompt.ttl_s) == ("sales", False, 600)
            assert prompt.expires_unix_s > 0
            async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                await update(daemon.stub, sliding=True, ttl_s=0)
            await pin(daemon.stub, labels=cache_pb2.Labels())
            assert not (await prompt_of(daemon.stub)).labels
            await unpin(daemon.stub)
            assert (await prompt_of(daemon.stub)).owner == "sales"

        play(scenario)

    def test_labels_of_kvtier_are_set_by_an_apply_only(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            own = cache_pb2.Labels(values={"kvtier/set": "s"})
            async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                await pin(daemon.stub, labels=own)
            await pin(daemon.stub)
            async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                await update(daemon.stub, set_labels=dict(own.values))
            await apply(daemon.stub, cache_pb2.PinRequest(name="q", recipe_json="{}", labels=own))
            assert dict((await prompt_of(daemon.stub, "q")).labels) == {"kvtier/set": "s"}
            await update(daemon.stub, "q", removed_labels=["kvtier/set"])
            assert not (await prompt_of(daemon.stub, "q")).labels

        play(scenario)

    def test_a_prompt_gets_another_name(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            pin_id = await pin(daemon.stub, "p", tokens=40)
            await pin(daemon.stub, "q", tokens=40, first=1)
            request = cache_pb2.RenamePromptRequest(name="p", new_name="r")
            assert (await daemon.stub.RenamePrompt(request)).name == "r"
            assert (await prompt_of(daemon.stub, "r")).pin_id == pin_id
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await daemon.stub.RenamePrompt(request)
            async with refused(Code.ALREADY_EXISTS, "PromptExistsError"):
                await daemon.stub.RenamePrompt(cache_pb2.RenamePromptRequest(name="r", new_name="q"))
            async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                await daemon.stub.RenamePrompt(cache_pb2.RenamePromptRequest(name="r", new_name="r"))

        play(scenario)

    def test_prompts_are_applied_all_or_none(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            await pin(daemon.stub, "old", tokens=40)
            recipe = cache_pb2.PinRequest(name="a", recipe_json='{"kind": "system"}', ttl_s=60)
            tokens = cache_pb2.PinRequest(name="b", tokens=range(40), recipe_json="{}")
            for wrong in (
                cache_pb2.PinRequest(name="two words", tokens=range(40)),
                cache_pb2.PinRequest(name="a", tokens=range(40)),
            ):
                async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                    await apply(daemon.stub, recipe, wrong, unpin=["old"])
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await apply(daemon.stub, recipe, tokens, unpin=["none"])
            await apply(daemon.stub, recipe, tokens, unpin=["old"], dry_run=True)
            assert [prompt.name for prompt in await listed(daemon.stub)] == ["old"]
            answer = await apply(daemon.stub, recipe, tokens, unpin=["old"])
            assert [(each.name, each.made) for each in answer.pins] == [("a", "a"), ("b", "b")]
            prompts = {prompt.name: prompt for prompt in await listed(daemon.stub)}
            assert {name: prompt.pinned for name, prompt in prompts.items()} == {"a": True, "b": True, "old": False}
            assert prompts["a"].state == State.UNRENDERED
            assert prompts["a"].source_digest
            assert prompts["a"].source_digest != prompts["b"].source_digest
            # The same again without tokens, which vLLM has made meanwhile.
            again = cache_pb2.PinRequest(name="b", recipe_json="{}", priority=3)
            (made,) = (await apply(daemon.stub, again)).pins
            assert made.pin_id == prompts["b"].pin_id
            prompt = await prompt_of(daemon.stub, "b")
            assert (prompt.num_tokens, prompt.priority) == (40, 3)

        play(scenario)

    def test_an_apply_changes_only_pins_that_are_as_expected(self, play: Play) -> None:
        Expected = cache_pb2.ExpectedPin

        def of_set(name: str) -> cache_pb2.Labels:
            return cache_pb2.Labels(values={"kvtier/set": name} if name else {})

        async def scenario(daemon: Subject) -> None:
            pin = cache_pb2.PinRequest(name="p", recipe_json="{}", labels=of_set("a"))
            new = cache_pb2.PinRequest(name="new", recipe_json="{}")
            (made,) = (await apply(daemon.stub, pin, expected=Expected(absent=True))).pins
            await apply(daemon.stub, pin, expected=Expected(absent=True, set="a"))  # the same files at once
            rendered = cache_pb2.PinRequest(name="p", recipe_json="{}", tokens=range(40), labels=of_set("a"))
            await apply(daemon.stub, rendered, expected=Expected(absent=True, set="a"), dry_run=True)
            other = cache_pb2.PinRequest(name="p", recipe_json="[1]", labels=of_set("a"))
            for asked, expected in (
                (pin, Expected(absent=True)),
                (pin, Expected(absent=True, set="b")),
                (other, Expected(absent=True, set="a")),
            ):
                async with refused(Code.ALREADY_EXISTS, "PromptExistsError"):
                    await apply(daemon.stub, asked, expected=expected)
            await apply(daemon.stub, pin, expected=Expected(set="a", pin_id="0"))  # it was rendered, say
            for expected in (
                Expected(),
                Expected(set="b"),
                Expected(set="a", pin_id="0"),
                Expected(pin_id=made.pin_id),
            ):
                async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                    await apply(daemon.stub, other, expected=expected)
                async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                    await apply(daemon.stub, unpin=["p"], expected=expected, dry_run=True)
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await apply(daemon.stub, new, expected=Expected(set="a"))
            assert [each.name for each in await listed(daemon.stub)] == ["p"]
            seen = Expected(set="a", pin_id=made.pin_id)
            moved = cache_pb2.PinRequest(name="p", recipe_json="{}", labels=of_set("b"))
            await apply(daemon.stub, moved, expected=seen)
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await apply(daemon.stub, unpin=["p"], expected=seen)
            await apply(daemon.stub, unpin=["p"], expected=Expected(set="b", pin_id=made.pin_id))
            assert not (await prompt_of(daemon.stub)).pinned
            await apply(daemon.stub, unpin=["p", "never"], expected=Expected(set="b", pin_id=made.pin_id))
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await apply(daemon.stub, pin, expected=Expected(set="b", pin_id=made.pin_id))
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await apply(daemon.stub, unpin=["never"])
            await apply(daemon.stub, pin, expected=Expected(absent=True))

        play(scenario)

    def test_what_is_not_durable_can_be_listed_alone(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=48)
                await engine.bind("p")
                await engine.store("p", 3)
                await pin(daemon.stub, "source", tokens=0, recipe_json="{}")
                await pin(daemon.stub, "ended", tokens=40)
                await unpin(daemon.stub, "ended")

                async def only_the_source() -> bool:
                    answer = await daemon.stub.ListPrompts(cache_pb2.ListPromptsRequest(unfinished=True))
                    return [prompt.name for prompt in answer.prompts] == ["source"]

                await until(only_the_source)

        play(scenario)

    def test_every_chunk_of_a_prompt_is_verified_in_each_tier(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await daemon.stub.VerifyPrompt(cache_pb2.VerifyPromptRequest(name="p"))
            await pin(daemon.stub, "early", tokens=48)
            async with refused(Code.FAILED_PRECONDITION, "PromptNotBoundError"):
                await daemon.stub.VerifyPrompt(cache_pb2.VerifyPromptRequest(name="early"))
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=64)
                await engine.bind("p")
                await engine.store("p", 3)
                report = await daemon.stub.VerifyPrompt(cache_pb2.VerifyPromptRequest(name="p"))
                (found,) = report.namespaces
                assert (report.name, found.num_chunks, found.num_lost_chunks) == ("p", 4, 1)
                for tier in (found.host, found.disk):
                    assert (tier.num_verified_chunks, tier.num_damaged_chunks, tier.num_missing_chunks) == (3, 0, 1)
                    assert tier.verified_bytes > 0
                request = cache_pb2.VerifyPromptRequest(name="p", namespace_id=found.namespace_id)
                assert len((await daemon.stub.VerifyPrompt(request)).namespaces) == 1
                async with refused(Code.FAILED_PRECONDITION, "PromptNotBoundError"):
                    await daemon.stub.VerifyPrompt(cache_pb2.VerifyPromptRequest(name="p", namespace_id="other"))

        play(scenario)

    def test_a_namespace_is_quarantined_and_released(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            quarantine, release = cache_pb2.QuarantineNamespaceRequest, cache_pb2.ReleaseNamespaceRequest
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=48)
                await engine.bind("p")
                (binding,) = (await prompt_of(daemon.stub)).bindings
                name = binding.namespace_id

                async def reasons() -> set[str]:
                    return {each.quarantine_reason for each in (await status_of(daemon.stub)).namespaces} - {""}

                assert not await reasons()
                async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                    await daemon.stub.QuarantineNamespace(quarantine(namespace_id=name))
                status = await daemon.stub.QuarantineNamespace(quarantine(namespace_id=name, reason="wrong answers"))
                assert (status.namespace_id, status.quarantine_reason) == (name, "wrong answers")
                assert await reasons() == {"wrong answers"}
                await daemon.stub.QuarantineNamespace(quarantine(namespace_id=name, reason="other"))
                assert await reasons() == {"other"}
                for _ in range(2):
                    assert not (await daemon.stub.ReleaseNamespace(release(namespace_id=name))).quarantine_reason
                assert not await reasons()
            async with refused(Code.NOT_FOUND, "NamespaceNotFoundError"):
                await daemon.stub.QuarantineNamespace(quarantine(namespace_id="none", reason="x"))
            async with refused(Code.NOT_FOUND, "NamespaceNotFoundError"):
                await daemon.stub.ReleaseNamespace(release(namespace_id="none"))

        play(scenario)

    def test_a_replacement_that_is_unpinned_is_forgotten(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=48)
                await engine.bind("p")
                await engine.store("p", 3)
                await pin(daemon.stub, "p", tokens=64, replace=True)
                pinned = await daemon.stub.GetPrompt(cache_pb2.GetPromptRequest(name="p"))
                assert pinned.replacement == "p@2"
                assert not (await daemon.stub.Unpin(cache_pb2.UnpinRequest(name="p@2"))).pinned
                async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                    await daemon.stub.GetPrompt(cache_pb2.GetPromptRequest(name="p@2"))
                status = await daemon.stub.GetPrompt(cache_pb2.GetPromptRequest(name="p"))
                assert (status.pinned, status.replacement, status.pin_id) == (True, "", pinned.pin_id)

        play(scenario)

    def test_what_is_not_durable_is_not_ready(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            ask = daemon.stub.CheckReady
            assert (await ask(cache_pb2.ReadyRequest())).ready, "nothing is pinned"
            await pin(daemon.stub, "q", tokens=32)
            assert not (await ask(cache_pb2.ReadyRequest(where=cache_pb2.ReadyRequest.DEVICE))).ready, "no engine"
            await daemon.stub.Unpin(cache_pb2.UnpinRequest(name="q"))
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=48)
                await engine.bind("p")
                waits = await ask(cache_pb2.ReadyRequest())
                assert (waits.ready, waits.num_prompts, waits.num_ready) == (False, 1, 0)
                assert [(each.name, each.state) for each in waits.waiting] == [("p", State.CAPTURING)]
                assert waits.waiting[0].why
                await engine.store("p", 3)
                for where in (cache_pb2.ReadyRequest.DISK, cache_pb2.ReadyRequest.HOST):
                    ready = await ask(cache_pb2.ReadyRequest(names=["p"], where=where))
                    assert (ready.ready, ready.num_prompts, ready.num_ready) == (True, 1, 1)
            async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                await ask(cache_pb2.ReadyRequest(where=7))  # type: ignore[arg-type]
            async with refused(Code.NOT_FOUND, "PromptNotFoundError"):
                await ask(cache_pb2.ReadyRequest(names=["none"]))

        play(scenario)

    def test_what_happens_can_be_watched(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            call = daemon.stub.WatchEvents(cache_pb2.WatchEventsRequest(names=["pin_registered"]))
            await call.initial_metadata()
            await pin(daemon.stub, "p", tokens=40)
            event = await asyncio.wait_for(anext(aiter(call)), 30)
            call.cancel()
            assert (event.name, event.level) == ("pin_registered", "info")
            assert (event.fields["name"], event.fields["num_tokens"]) == ("p", "40")
            assert abs(event.unix_s - time.time()) < 60

        play(scenario)

    def test_what_requests_had_of_a_pin_is_counted_and_explained(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            pin_id = await pin(daemon.stub, "p", tokens=48)
            hit = engine_pb2.RequestEnded(
                request_id="cmpl-1-0", outcome="HIT", pin_id=pin_id, prompt_tokens=60, shared_tokens=48,
                ended_unix_s=1e9, device_tokens=16, host_tokens=16, disk_tokens=16,
            )  # fmt: skip
            diverged = engine_pb2.RequestEnded(
                request_id="two",
                outcome="DIVERGED",
                pin_id=pin_id,
                prompt_tokens=60,
                shared_tokens=16,
                ended_unix_s=2e9,
            )
            unknown = engine_pb2.RequestEnded(request_id="three", outcome="UNKNOWN", prompt_tokens=60)
            async with daemon.engine() as engine:
                await engine.report(hit, diverged, unknown)
                coming = await daemon.stub.Explain(cache_pb2.ExplainRequest(tokens=range(60)))
                assert (coming.last_request.request_id, coming.last_request.pin_name) == ("two", "p")
                assert not coming.HasField("request")
            (listed,) = (await daemon.stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
            for usage in (listed.usage, (await prompt_of(daemon.stub)).usage):
                assert (usage.num_hits, usage.device_tokens, usage.host_tokens, usage.disk_tokens) == (1, 16, 16, 16)
                assert usage.last_hit_unix_s == usage.last_used_unix_s == 1e9
                assert usage.saved_prefill_s > 0
                assert [(each.outcome, each.num_requests) for each in usage.others] == [(engine_pb2.DIVERGED, 1)]
            for fields, ids in (
                ({}, ["three", "two", "cmpl-1-0"]),
                ({"max_requests": 1}, ["three"]),
                ({"misses_only": True}, ["two"]),
                ({"outcomes": ["HIT", "UNKNOWN"]}, ["three", "cmpl-1-0"]),
            ):
                asked = cache_pb2.ListRecentRequestsRequest(**fields)
                recent = (await daemon.stub.ListRecentRequests(asked)).requests
                assert [each.request_id for each in recent] == ids
            for request_id in ("cmpl-1-0", "cmpl-1", "1"):  # vLLM's, that of the answer, the client's X-Request-Id
                explained = await daemon.stub.Explain(cache_pb2.ExplainRequest(request_id=request_id))
                assert (explained.outcome, explained.request.pin_name) == (engine_pb2.HIT, "p")
            assert explained.reason
            assert [(each.name, each.shared_tokens) for each in explained.prompts] == [("p", 48)]
            async with refused(Code.NOT_FOUND, "RequestNotFoundError"):
                await daemon.stub.Explain(cache_pb2.ExplainRequest(request_id="none"))
            for wrong in ({}, {"request_id": "cmpl-1", "tokens": [1]}):
                async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                    await daemon.stub.Explain(cache_pb2.ExplainRequest(**wrong))  # type: ignore[arg-type]

        play(scenario)

    def test_when_missing_chunks_were_evicted_by_command_is_explained(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=50)
                await engine.bind("p")
                await engine.store("p", 2)
                began_s = time.time()
                await daemon.stub.Evict(cache_pb2.EvictRequest(name="p", force=True))
                explained = await daemon.stub.Explain(cache_pb2.ExplainRequest(tokens=range(60)))
                assert explained.outcome == engine_pb2.NOT_STORED
                (binding,) = explained.prompts[0].bindings
                assert (binding.num_host_chunks, binding.num_disk_chunks, binding.num_missing_chunks) == (0, 0, 3)
                evicted, never = binding.missing
                assert (evicted.cause, evicted.num_chunks) == (Cause.EVICTED_BY_COMMAND, 2)
                assert began_s <= evicted.last_unix_s <= time.time()
                assert (never.cause, never.num_chunks, never.last_unix_s) == (Cause.NOT_RECORDED, 1, 0)

        play(scenario)

    def test_what_a_request_would_get_now_is_explained(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            async def explain(tokens: Sequence[int]) -> cache_pb2.Explanation:
                answer: cache_pb2.Explanation = await daemon.stub.Explain(cache_pb2.ExplainRequest(tokens=tokens))
                return answer

            assert (await explain(range(60))).outcome == engine_pb2.NO_SESSION
            async with daemon.engine() as engine:
                await pin(daemon.stub, "p", tokens=50)
                await engine.bind("p")
                (never,) = (await explain(range(60))).prompts[0].bindings[0].missing
                assert (never.cause, never.num_chunks, never.last_unix_s) == (Cause.NOT_RECORDED, 3, 0)
                assert (await explain(range(5))).outcome == engine_pb2.TOO_SHORT
                assert (await explain(range(60))).outcome == engine_pb2.NOT_STORED
                await engine.store("p", 3)
                assert (await explain(range(60))).outcome == engine_pb2.HIT
                assert (await explain(range(500, 560))).outcome == engine_pb2.UNKNOWN
                changed = await explain([*range(40), 7, *range(41, 60)])
                assert changed.outcome == engine_pb2.DIVERGED
                (near,) = changed.prompts
                assert (near.name, near.num_tokens, near.shared_tokens, near.differs_at) == ("p", 50, 40, 40)
                (binding,) = near.bindings
                assert (binding.live, binding.bound) == (True, True)
                assert (binding.shared_tokens, binding.lost_tokens, binding.num_host_chunks) == (32, 8, 2)
                assert list(binding.missing) == []

        play(scenario)

    def test_a_daemon_without_a_store_says_so(self, play: Play) -> None:
        async def scenario(daemon: Subject) -> None:
            assert await daemon.stub.GetRemote(cache_pb2.GetRemoteRequest(with_hosts=True)) == cache_pb2.RemoteStatus()

        play(scenario)
