"""The console of a daemon beside a real vLLM: what is computed, hit, found, applied and rolled back is what it shows.

The tests run in order, on one daemon and one engine.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import free_port, wait_until
from benchmarks.harness.prompts import system_prompt
from tests.e2e.console.conftest import OpenPage, shown
from tests.e2e.console.stub_api import StubDaemon
from tests.e2e.console.test_screens import keep
from tests.e2e.harness import EVICTING, Stack, forget_gpu, running_stack

SYSTEM = system_prompt(0)[:6000]
CHANGED = SYSTEM.replace("# Tools", "# Instruments")
SLOW_MS = 60_000


@dataclass
class World:
    """What the tests share."""

    stack: Stack
    engine: Engine
    url: str
    num_asked: int = 0

    def chat(self, system: str) -> None:
        """Ask a new question under a system prompt."""
        self.num_asked += 1
        with openai.OpenAI(base_url=f"{self.engine.url}/v1", api_key="none", timeout=110, max_retries=0) as client:
            client.chat.completions.create(model="model", messages=self.messages(system), max_tokens=1)

    def messages(self, system: str) -> list[Any]:
        """Return a conversation of this system prompt."""
        question = f"Question {self.num_asked}: what do you say to {self.num_asked * 7}?"
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    options = EngineOptions(
        model=str(cached_model("tiny", TINY)),
        max_model_len=4096,
        block_size=32,
        pool_blocks=400,
        connector_config=EVICTING,
    )
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "KVTIER_ACCESS_AUTH": "none",
        "KVTIER_HTTP_LISTEN": address,
        "KVTIER_CACHE_AUTO_PIN_MIN_TOKENS": "256",
    }
    with (
        running_stack(options, start_daemon=False, daemon_settings=settings) as stack,
        stack.unstarted_engine() as engine,
    ):
        stack.daemon.set_variable("KVTIER_HTTP_VLLM_URL", engine.url)
        stack.daemon.start()
        engine.start()
        stack.wait_attached(engine)
        yield World(stack, engine, f"http://{address}")


@pytest.fixture
def daemon(world: World) -> StubDaemon:
    """The real daemon instead of the stub; only its address is of use."""
    return StubDaemon(url=world.url)


def test_a_system_prompt_is_pinned_computed_and_its_chunks_are_shown(open_page: OpenPage, world: World) -> None:
    page = open_page("prompts")
    page.get_by_role("button", name="Pin a prompt").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("support")
    dialog.get_by_label("Source").fill(SYSTEM)
    dialog.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_role("heading", name="support", level=1).wait_for()

    page.locator(".badge").get_by_text("durable", exact=True).first.wait_for(timeout=SLOW_MS)
    binding = world.stack.json("show", "support")["bindings"][-1]
    chunks = f"{binding['num_chunks']} chunks in prefix order: {binding['num_chunks']} in host memory and disk"
    page.get_by_role("img", name=chunks).wait_for()
    page.get_by_role("tab", name="Source").click()
    page.get_by_text(SYSTEM[:60]).first.wait_for()
    keep(page, "real-prompt-source")


def test_a_hit_is_listed_and_counted(open_page: OpenPage, world: World) -> None:
    num_tokens = world.stack.json("show", "support")["bindings"][-1]["covered_tokens"]
    forget_gpu(world.engine)
    world.chat(SYSTEM)
    page = open_page("requests")
    page.locator("tbody th").get_by_role("link", name="support").first.wait_for()
    assert page.locator("tbody td").first.inner_text() == "hit"
    keep(page, "real-requests")

    page.get_by_role("link", name="Overview").click()
    shown(page)
    page.get_by_text("by kvtier, since").wait_for()
    page.locator(".tile").filter(has_text="Tokens restored").get_by_text(f"{num_tokens:,}").wait_for()
    page.get_by_role("link", name="support").first.wait_for()
    keep(page, "real-overview")


def test_a_request_is_explained_by_the_word_that_differs(open_page: OpenPage, world: World) -> None:
    page = open_page("prompts/support?tab=explain")
    request = {"model": "model", "messages": world.messages(CHANGED)}
    page.get_by_label("Request", exact=True).fill(json.dumps(request))
    page.get_by_role("button", name="Explain", exact=True).click()
    page.get_by_role("heading", name="Where it differs from support").wait_for(timeout=SLOW_MS)
    assert page.locator(".difference mark").all_inner_texts() == ["Instruments", "Tools"]
    keep(page, "real-explain")

    request["messages"] = world.messages(SYSTEM)
    page.get_by_label("Request", exact=True).fill(json.dumps(request))
    page.get_by_role("button", name="Explain", exact=True).click()
    page.locator(".difference").wait_for(state="detached")
    page.get_by_text("First differing token").wait_for(state="detached")
    assert "hit" in page.locator(".badge").all_inner_texts()


def test_a_prompt_that_was_found_is_accepted_with_one_click(open_page: OpenPage, world: World) -> None:
    found, num_asked = system_prompt(1)[:6000], 0
    while not (pins := [each for each in world.stack.json("list") if each["origin"] == "auto"]):
        world.chat(found)
        num_asked += 1
        assert num_asked < 30, world.stack.json("advise")
    automatic = pins[0]["name"]
    page = open_page("advise")
    keep(page, "real-advise")
    page.get_by_role("button", name=f"Accept {automatic}", exact=True).click()
    named = automatic.replace("auto-", "prompt-")
    page.get_by_text(f"{named} is pinned, and stays.").wait_for()

    assert world.stack.json("show", named)["origin"] == "named"


def test_a_file_is_applied_and_a_version_rolled_back(open_page: OpenPage, world: World) -> None:
    file = {"prompts": [{"name": "support", "system": CHANGED, "priority": 5}, {"name": "short", "system": "Be kind."}]}
    page = open_page("apply")
    page.get_by_label("File", exact=True).fill(json.dumps(file, indent=1))
    page.get_by_role("button", name="Show what would change").click()
    page.get_by_role("button", name="Apply 2 changes").click(timeout=SLOW_MS)
    page.get_by_role("heading", name="Applied").wait_for(timeout=SLOW_MS)
    keep(page, "real-applied")
    wait_until(lambda: world.stack.json("show", "support")["priority"] == 5, 60, "the new version to take its place")

    page.evaluate("() => { location.hash = '#/prompts/support?tab=versions'; }")
    page.locator(".diff ins").first.wait_for()
    keep(page, "real-versions")
    (before,) = [each["name"] for each in world.stack.json("history", "support") if each["name"] != "support"]
    page.get_by_role("button", name=f"Roll back to {before}").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()

    def is_back() -> bool:
        return SYSTEM in world.stack.json("show", "support")["recipe"].values()

    wait_until(is_back, 60, "the version from before")
    page.get_by_role("tab", name="Chunks").click()
    page.locator(".badge").get_by_text("durable", exact=True).first.wait_for(timeout=SLOW_MS)


def test_what_leaves_host_memory_comes_from_disk_and_is_intact(open_page: OpenPage, world: World) -> None:
    page = open_page("prompts/support")
    page.get_by_role("button", name="Verify", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Verify", exact=True).click()
    page.get_by_text("support is intact").wait_for(timeout=SLOW_MS)
    page.get_by_role("button", name="Evict", exact=True).click()
    dialog.get_by_label("From").select_option("host")
    dialog.get_by_role("button", name="Evict", exact=True).click()
    page.get_by_role("img", name="in disk only").wait_for()
    keep(page, "real-disk-only")

    forget_gpu(world.engine)
    before = world.engine.cached_by_source()["disk"]
    world.chat(SYSTEM)
    assert world.engine.cached_by_source()["disk"] > before
