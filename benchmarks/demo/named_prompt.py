"""Act one: an operator pins a system prompt by its name."""

from benchmarks.demo.stage import Stage
from benchmarks.demo.story import Act
from benchmarks.harness.prompts import system_prompt
from benchmarks.measuring.chat_requests import forget_device_cache

PROMPT_NAME = "harbour-support"
VARIANT = 0
TITLE = "Pinned by hand"


def play(stage: Stage) -> Act:
    """Pin the prompt, do everything to it, and leave it only on disk at last.

    Raises:
        DemoError: A step failed.
    """
    stage.title(f"Act one. {TITLE}: an operator knows the system prompt")
    stage.measure_cold()
    act = _pin(stage)
    stage.record(act, "right after kvtier pin", "device")
    stage.flood(act)
    forget_device_cache(stage.engine)
    stage.record(act, "vLLM's prefix cache emptied", "host")
    stage.restart_vllm(act)
    stage.measure_cold()
    stage.kill_daemon(act)
    stage.measure_cold()
    stage.say("evicting the prompt from host memory and from vLLM: only the disk has it now")
    stage.cli("evict", PROMPT_NAME, "--tier", "host", "--force")
    forget_device_cache(stage.engine)
    stage.record(act, "only on disk", "disk")
    return act


def _pin(stage: Stage) -> Act:
    path = stage.home / "system.md"
    path.write_text(system_prompt(VARIANT))
    stage.cli("pin", PROMPT_NAME, "--system", str(path), "--url", stage.engine.url)
    (pin,) = stage.pins()
    return Act(title=TITLE, variant=VARIANT, num_tokens=pin.bindings[-1].covered_tokens)
