"""The main job on a small Llama: pinned before vLLM runs or while it runs, through floods, restarts and kill -9.

The tests of this file run in order, on one daemon and one engine after the other. Prefills are chunked: 256 tokens a
step.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import openai
import pytest
from openai.types.chat import ChatCompletionToolParam

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from benchmarks.harness.prompts import system_prompt
from kvtier._pb import cache_pb2, engine_pb2
from kvtier.client.remote_errors import RemoteError
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import (
    EVICTING,
    Answer,
    Stack,
    ask,
    ask_all,
    flood,
    forget_gpu,
    needs_tiers,
    prefix_cache_hit,
    running_stack,
    tokens,
)
from tests.fakes.promql import expressions, used_in

PREFIX_TOKENS = 640
EARLY, HELD, PLAIN = tokens(1, PREFIX_TOKENS), tokens(2, PREFIX_TOKENS), tokens(3, PREFIX_TOKENS)
SHORT, LONG = tokens(4, 40), tokens(5, 300)
ORDER_TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_order",
        "description": "Returns one order with its items and its state.",
        "parameters": {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]},
    },
}
QUESTIONS = [tokens(10 + i, 60) for i in range(6)]


@dataclass
class World:
    """What the tests share.

    Attributes:
        references: Answers with the prefix computed by vLLM, before anything of it was stored.
    """

    stack: Stack
    engines: ExitStack
    engine: Engine
    references: dict[str, Answer] = field(default_factory=dict)

    def restart_engine(self) -> None:
        """End the engine and start another."""
        self.engines.close()
        self.engine = self.engines.enter_context(self.stack.engine())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Pin by token ids before there is an engine, then start one."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)), max_batched_tokens=256, connector_config=EVICTING)
    with running_stack(options) as stack, ExitStack() as engines:
        stack.pin("early", EARLY)
        assert stack.json("show", "early")["state"] == "WAITING"
        yield World(stack, engines, engines.enter_context(stack.engine()))


def test_oracle_sees_the_kv_cache(world: World) -> None:
    """Another prefix, same question: other logprobs. Else equality would prove nothing."""
    one, other = (prefix_cache_hit(world.engine, prefix, SHORT) for prefix in (HELD, PLAIN))
    assert one.logprobs != other.logprobs


def test_pin_by_tokens_is_captured_when_first_computed(world: World, compare: Comparisons) -> None:
    """EARLY was pinned before vLLM ran, and was not warmed."""
    stack, engine = world.stack, world.engine
    stack.wait_attached(engine)
    first = ask(engine, EARLY, max_tokens=1)
    assert first.cached_tokens == 0
    reference = ask(engine, EARLY + SHORT)
    assert reference.by_source["device"] == PREFIX_TOKENS
    stack.wait_durable("early")
    flood(engine, 10_000)
    compare.restored_equals_prefix_cache_hit(ask(engine, EARLY + SHORT), reference, "host")
    world.references["early"] = reference


def test_pin_stores_what_vllm_holds_already(world: World, compare: Comparisons) -> None:
    """HELD is in vLLM's prefix cache when it is pinned, so warming computes nothing, and it is stored all the same."""
    stack, engine = world.stack, world.engine
    world.references |= {"short": prefix_cache_hit(engine, HELD, SHORT), "long": prefix_cache_hit(engine, HELD, LONG)}
    computed_before = engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    done = stack.pin("held", HELD, engine)
    computed = engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute") - computed_before
    assert computed <= 2 * engine.options.block_size, "the warm request should have hit vLLM's cache"
    assert f"{PREFIX_TOKENS // 32}/{PREFIX_TOKENS // 32}" in done.stdout
    assert stack.json("show", "held")["state"] == "DURABLE"
    assert flood(engine, 20_000) > engine.options.pool_blocks * engine.options.block_size
    for name, question in (("short", SHORT), ("long", LONG)):
        compare.restored_equals_prefix_cache_hit(ask(engine, HELD + question), world.references[name], "host")
        forget_gpu(engine)


def test_the_doctor_finds_nothing_wrong(world: World) -> None:
    """With a real vLLM: its metrics name the settings, its environment loads the connector, its engine is attached."""
    stack, engine = world.stack, world.engine
    found = {finding["id"]: finding for finding in stack.json("doctor", "--url", engine.url)}
    judged = [check for check in found if check.startswith(("daemon.", "vllm.", "server.", "pins."))]
    assert {found[check]["status"] for check in judged} == {"ok"}, found
    assert found["server.hash_algorithm"]["found"] == "sha256"


def test_only_pinned_prefixes_are_stored(world: World) -> None:
    """Prompts that are not pinned, and what follows a pinned prefix, leave nothing behind."""
    stack, engine = world.stack, world.engine
    status = stack.json("status")
    assert status["disk"]["num_chunks"] == 2 * PREFIX_TOKENS // 32
    assert status["host"]["num_chunks"] == 2 * PREFIX_TOKENS // 32
    forget_gpu(engine)
    assert ask(engine, PLAIN + SHORT).cached_tokens == 0


def test_cache_salt_isolates(world: World, compare: Comparisons) -> None:
    """A salted request never hits the unsalted pin; a salted pin is hit under its salt only."""
    stack, engine = world.stack, world.engine
    forget_gpu(engine)
    assert ask(engine, HELD + SHORT, cache_salt="tenant").cached_tokens == 0
    reference = prefix_cache_hit(engine, HELD, SHORT, cache_salt="tenant")
    stack.pin("salted", HELD, engine, "--cache-salt", "tenant")
    forget_gpu(engine)
    compare.restored_equals_prefix_cache_hit(ask(engine, HELD + SHORT, cache_salt="tenant"), reference)
    forget_gpu(engine)
    assert ask(engine, HELD + SHORT, cache_salt="other").cached_tokens == 0
    stack.cli("unpin", "salted")
    stack.cli("evict", "salted")


def test_system_prompt_with_tools(world: World, note: Note) -> None:
    """vLLM renders it when it is pinned; a chat with another question gets every whole chunk of it."""
    stack, engine = world.stack, world.engine
    system, tools = system_prompt(0)[:1500], [ORDER_TOOL]
    (stack.home / "system.md").write_text(system)
    (stack.home / "tools.json").write_text(json.dumps(tools))
    files = ("--system", str(stack.home / "system.md"), "--tools", str(stack.home / "tools.json"))
    stack.cli("pin", "chat", *files, "--url", engine.url)
    covered_tokens = stack.json("show", "chat")["bindings"][0]["covered_tokens"]
    forget_gpu(engine)
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        completion = client.chat.completions.create(
            model="model",
            messages=[{"role": "system", "content": system}, {"role": "user", "content": "Where is my order?"}],
            tools=tools,
            tool_choice="none",
            max_tokens=4,
        )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == covered_tokens
    note(f"{covered_tokens} of {completion.usage.prompt_tokens} tokens of a chat with tools restored")
    assert covered_tokens > 0.8 * completion.usage.prompt_tokens
    stack.cli("unpin", "chat")
    stack.cli("evict", "chat")


def test_chat_template_kwargs(world: World, note: Note) -> None:
    """Chats with `enable_thinking` false begin with other tokens: pinned with it, and rendered again, they hit."""
    stack, engine = world.stack, world.engine
    system, kwargs = system_prompt(1)[:1500], {"enable_thinking": False}
    (stack.home / "system.md").write_text(system)
    files = ("--system", str(stack.home / "system.md"), "--chat-template-kwargs", json.dumps(kwargs))
    stack.cli("pin", "brief", *files, "--url", engine.url)
    shown = stack.json("show", "brief")
    stack.cli("pin", "brief", "--url", engine.url)
    assert stack.json("show", "brief")["tokens_digest"] == shown["tokens_digest"]
    assert f"chat_template_kwargs {json.dumps(kwargs)}" in stack.cli("show", "brief").stdout
    covered_tokens = shown["bindings"][0]["covered_tokens"]
    cached = [_chat_cached_tokens(engine, system, each) for each in (kwargs, {}, {"enable_thinking": True})]
    note(f"{covered_tokens} tokens restored with the pinned kwargs, {cached[1:]} without and with others")
    assert cached == [covered_tokens, 0, 0]
    stack.cli("unpin", "brief")
    stack.cli("evict", "brief")


def _chat_cached_tokens(engine: Engine, system: str, kwargs: dict[str, bool]) -> int:
    forget_gpu(engine)
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        completion = client.chat.completions.create(
            model="model",
            messages=[{"role": "system", "content": system}, {"role": "user", "content": "Where is my order?"}],
            max_tokens=4,
            extra_body={"chat_template_kwargs": kwargs},
        )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    return completion.usage.prompt_tokens_details.cached_tokens or 0


def test_several_requests_share_the_prefix_at_once(world: World, compare: Comparisons) -> None:
    """All of them are served; the restored bytes are right."""
    stack, engine = world.stack, world.engine
    before = stack.stored_checksums()
    flood(engine, 30_000)
    answers = ask_all(engine, [HELD + question for question in QUESTIONS])
    assert [answer.cached_tokens for answer in answers] == [PREFIX_TOKENS] * len(QUESTIONS)
    stack.store_again("held", HELD, engine)
    compare.same_bytes(before, stack.stored_checksums())


def test_preempted_requests_are_restored_right(world: World, compare: Comparisons, note: Note) -> None:
    """More running requests than vLLM's pool holds: some are preempted, and look up again.

    Ten requests that end with 12 blocks each beside a prompt of 20, in a pool of 63: four at a time are too many.
    """
    stack, engine = world.stack, world.engine
    before = stack.stored_checksums()
    preempted_before = engine.metric("vllm:num_preemptions_total")
    flood(engine, 40_000)
    questions = [*QUESTIONS, *(tokens(60 + i, 60) for i in range(4))]
    answers = ask_all(engine, [HELD + question for question in questions], max_tokens=300)
    assert all(len(answer.logprobs) == 300 for answer in answers)
    preempted = engine.metric("vllm:num_preemptions_total") - preempted_before
    assert preempted > 0
    note(f"{preempted:.0f} preemptions")
    stack.store_again("held", HELD, engine)
    compare.same_bytes(before, stack.stored_checksums())
    flood(engine, 50_000)
    compare.restored_equals_prefix_cache_hit(ask(engine, HELD + LONG), world.references["long"])


def test_engine_restart(world: World, compare: Comparisons) -> None:
    """A new vllm serve, the same daemon: from host memory."""
    world.restart_engine()
    world.stack.wait_attached(world.engine)
    for name, prompt in (("early", EARLY + SHORT), ("short", HELD + SHORT), ("long", HELD + LONG)):
        compare.restored_equals_prefix_cache_hit(ask(world.engine, prompt), world.references[name], "host")
        forget_gpu(world.engine)


def test_daemon_kill_and_engine_restart(world: World, compare: Comparisons, note: Note) -> None:
    """Kill -9 loses no pin and no chunk: from the memory it left; with that lost too from disk, then from memory."""
    stack = world.stack
    pins_before, chunks_before = stack.json("list"), stack.stored_checksums()
    stack.daemon.kill()
    stack.daemon.start()
    note(f"the daemon is ready {stack.daemon.ready_s:.2f} s after its start")
    assert [prompt["name"] for prompt in stack.json("list")] == [prompt["name"] for prompt in pins_before]
    assert stack.stored_checksums() == chunks_before
    world.restart_engine()
    stack.wait_attached(world.engine)
    for tier in ("host", "disk", "host"):
        if tier == "disk":
            stack.daemon.kill()
            stack.daemon.lose_memory()
            stack.daemon.start()
            stack.wait_attached(world.engine)
            forget_gpu(world.engine)
        for name, prompt in (("early", EARLY + SHORT), ("long", HELD + LONG)):
            compare.restored_equals_prefix_cache_hit(ask(world.engine, prompt), world.references[name], tier)
            forget_gpu(world.engine)
    # Once more the bytes: disk -> host -> vLLM -> host -> disk.
    ask(world.engine, HELD + SHORT, max_tokens=1)
    stack.store_again("held", HELD, world.engine)
    compare.same_bytes(chunks_before, stack.stored_checksums())


def test_reboot(world: World, compare: Comparisons, note: Note) -> None:
    """With its shared memory gone, the daemon brings pinned prompts back to host memory before anybody asks."""
    stack = world.stack
    stack.daemon.kill()
    stack.daemon.lose_memory()
    stack.daemon.set_variable("TUNED_HOST_PREFETCH", "true")
    stack.daemon.start()
    waited_s = max(stack.wait_in_host_memory(name) for name in ("early", "held"))
    note(f"pinned prompts are in host memory {waited_s:.2f} s after the daemon was ready")
    stack.daemon.set_variable("TUNED_HOST_PREFETCH", "false")
    stack.wait_attached(world.engine)
    promoted = stack.counters()["promoted_chunks"]
    for _ in range(3):
        forget_gpu(world.engine)
        compare.restored_equals_prefix_cache_hit(ask(world.engine, EARLY + SHORT), world.references["early"], "host")
    assert stack.counters()["promoted_chunks"] == promoted, "a hot prompt was read from disk again"


@needs_tiers
def test_metrics_of_engine_and_daemon(world: World) -> None:
    """One prompt from host memory, as vLLM, the connector in it and the daemon count it."""
    stack, engine = world.stack, world.engine
    num_chunks, raw_bytes = PREFIX_TOKENS // 32, stack.json("show", "early")["bindings"][-1]["raw_bytes"]
    forget_gpu(engine)
    before, daemon_before = _counted(engine), stack.counters()
    assert ask(engine, EARLY + SHORT).by_source["host"] == PREFIX_TOKENS
    wait_until(lambda: _counted(engine)["answers"] > before["answers"], 60, "vLLM to count what the connector reports")
    grown = {name: value - before[name] for name, value in _counted(engine).items()}
    assert grown == {
        "whole": 1,
        "answers": 1,
        "chunks": num_chunks,
        "chunks_from_disk": 0,
        "bytes": raw_bytes,
        "tokens": PREFIX_TOKENS,
        "attached": 0,
    }
    assert engine.metric("kvtier_connector_attached") == 1
    counters = stack.counters()
    assert counters["hit_chunks_host"] - daemon_before["hit_chunks_host"] == num_chunks
    assert stack.daemon.metric("kvtier_hit_bytes_total", tier="host") == counters["hit_bytes_host"]
    exported = engine.http.get("/metrics").text
    named = {name for expression in expressions() for name, _ in used_in(expression).selectors}
    for name in named:
        if name.startswith(("vllm:", "kvtier_connector_")):
            assert f"# TYPE {name.removesuffix('_bucket')} " in exported, f"the dashboard asks vLLM for {name}"


def _counted(engine: Engine) -> dict[str, float]:
    return {
        "whole": engine.metric("kvtier_connector_lookups_total", result="whole"),
        "answers": engine.metric("kvtier_connector_answer_seconds_count"),
        "chunks": engine.metric("kvtier_connector_loaded_chunks_total", tier="host"),
        "chunks_from_disk": engine.metric("kvtier_connector_loaded_chunks_total", tier="disk"),
        "bytes": engine.metric("vllm:kv_offload_load_bytes_total"),
        "tokens": engine.metric("vllm:prompt_tokens_cached_by_source_total", source="host"),
        "attached": engine.metric("kvtier_connector_attached"),
    }


def test_why_each_request_hit_or_missed(world: World) -> None:
    """From each tier, and not at all; the usage of the pin survives a kill of the daemon but for its last minutes."""
    stack, engine = world.stack, world.engine
    changed = [*EARLY[:320], *tokens(6, 320)]
    # Reports come in order: with this one all of earlier tests are counted.
    assert _outcome(world, EARLY[:20]) == ("TOO_SHORT", "", 0, 0, 0)
    with stack.admin() as client:
        before = client.get("early").usage
    forget_gpu(engine)
    assert _outcome(world, EARLY + SHORT) == ("HIT", "early", 0, PREFIX_TOKENS, 0)
    assert _outcome(world, EARLY + LONG) == ("HIT", "early", PREFIX_TOKENS, 0, 0)
    forget_gpu(engine)
    stack.cli("evict", "early", "--tier", "host")
    assert _outcome(world, EARLY + SHORT) == ("HIT", "early", 0, 0, PREFIX_TOKENS)
    forget_gpu(engine)
    assert _outcome(world, changed + SHORT) == ("DIVERGED", "early", 0, 320, 0)
    assert _outcome(world, tokens(77, 200)) == ("UNKNOWN", "", 0, 0, 0)
    assert _outcome(world, EARLY[:20]) == ("TOO_SHORT", "", 0, 0, 0)
    with stack.admin() as client:
        after = client.get("early").usage
        explained = client.explain(cache_pb2.ExplainRequest(tokens=changed))
    assert after.num_hits - before.num_hits == 3
    assert after.device_tokens - before.device_tokens == PREFIX_TOKENS
    assert after.host_tokens - before.host_tokens == PREFIX_TOKENS + 320
    assert after.disk_tokens - before.disk_tokens == PREFIX_TOKENS
    assert after.saved_prefill_s > before.saved_prefill_s
    assert engine_pb2.RequestOutcome.Name(explained.outcome) == "DIVERGED"
    assert (explained.prompts[0].name, explained.prompts[0].differs_at) == ("early", 320)


@needs_tiers
def test_the_answer_says_what_the_request_got(world: World) -> None:
    forget_gpu(world.engine)
    with openai.OpenAI(base_url=f"{world.engine.url}/v1", api_key="none", max_retries=0) as client:
        completion = client.completions.create(
            model="model",
            prompt=EARLY + SHORT,
            max_tokens=2,
            extra_body={"kv_transfer_params": {"kvtier": {"report": True}}},
        )
    assert completion.model_extra is not None
    report = completion.model_extra["kv_transfer_params"]["kvtier"]
    assert report == {
        "outcome": "hit",
        "shared_tokens": PREFIX_TOKENS,
        "saved_tokens": PREFIX_TOKENS,
        "cached_tokens": {"host": PREFIX_TOKENS},
    }
    recent = _recent(world, completion.id)
    assert (recent.outcome, recent.host_tokens) == (engine_pb2.HIT, PREFIX_TOKENS)


def _outcome(world: World, prompt: list[int]) -> tuple[str, str, int, int, int]:
    """Ask; return the outcome, the pin, and the tokens from device, host and disk."""
    with openai.OpenAI(base_url=f"{world.engine.url}/v1", api_key="none", max_retries=0) as client:
        completion = client.completions.create(model="model", prompt=prompt, max_tokens=2)
    found = _recent(world, completion.id)
    name = engine_pb2.RequestOutcome.Name(found.outcome)
    return name, found.pin_name, found.device_tokens, found.host_tokens, found.disk_tokens


def _recent(world: World, request_id: str) -> cache_pb2.RecentRequest:
    """Return what the engine has reported of a request, by the id of its answer."""
    found: list[cache_pb2.RecentRequest] = []

    def is_reported() -> bool:
        with world.stack.admin() as client:
            try:
                found.append(client.explain(cache_pb2.ExplainRequest(request_id=request_id)).request)
            except RemoteError:
                return False
        return True

    wait_until(is_reported, 60, f"the engine to report {request_id}")
    return found[0]


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_pack(world: World, compare: Comparisons, damage: str) -> None:
    """It is detected, counted, a miss with the right answer, and written again."""
    stack, engine = world.stack, world.engine
    stack.daemon.stop()
    forget_gpu(engine)
    computed = ask(engine, HELD + SHORT)
    assert computed.cached_tokens == 0
    forget_gpu(engine)
    for pack in stack.packs():
        data = bytearray(pack.read_bytes())
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        if damage == "flip":
            # In every chunk of the pack: the prompt's first chunk is among them.
            for offset in range(header_bytes + 100, len(data), 512):
                data[offset] ^= 1
        else:
            del data[header_bytes + 100 :]
        pack.write_bytes(data)
    stack.daemon.start()
    stack.wait_attached(engine)
    answer = ask(engine, HELD + SHORT)
    assert answer.cached_tokens == 0
    compare.same_logprobs(answer, computed)
    assert stack.counters()["damaged_chunks_disk"] > 0

    def is_whole_again() -> bool:
        # Damage is found chunk by chunk, some of it after the request that met the first had offered its own: what is
        # missing is stored with the next.
        forget_gpu(engine)
        return ask(engine, HELD + SHORT).restored_tokens == PREFIX_TOKENS

    wait_until(is_whole_again, 60, "the damaged chunks to be stored again")
    stack.wait_durable("held")
    forget_gpu(engine)
    compare.restored_equals_prefix_cache_hit(ask(engine, HELD + SHORT), world.references["short"])


def test_unpin_and_evict(world: World) -> None:
    """A pinned prompt is not evicted unless forced, and `explain` says then why it misses; an unpinned is forgotten."""
    stack = world.stack
    assert "pinned" in stack.cli("evict", "held", expect=1).stderr
    stack.cli("evict", "held", "--force")
    with stack.admin() as client:
        explained = client.explain(cache_pb2.ExplainRequest(tokens=HELD + SHORT))
    assert "nothing of it is stored: it was evicted by command;" in explained.reason
    (binding,) = explained.prompts[0].bindings
    assert [each.cause for each in binding.missing] == [cache_pb2.MissingChunks.EVICTED_BY_COMMAND]
    assert binding.missing[0].num_chunks == binding.num_missing_chunks > 0
    stack.cli("unpin", "held")
    stack.cli("evict", "held")
    assert [prompt["name"] for prompt in stack.json("list")] == ["early"]
    forget_gpu(world.engine)
    assert ask(world.engine, HELD + SHORT).cached_tokens == 0
