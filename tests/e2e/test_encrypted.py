"""A real vLLM over an encrypted disk: it is served from sealed packs, also after the key was replaced."""

from pathlib import Path

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.harness import EVICTING, HANG_S, Stack, ask, prefix_cache_hit, running_stack, tokens
from tests.fakes.keys import key_of_id, write_keys

PREFIX_TOKENS = 640
PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(11, 60)


def test_a_pin_is_served_from_sealed_packs_and_after_the_key_was_replaced(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "old")
    bundle = tmp_path / "p.sealed"
    options = EngineOptions(model=str(cached_model("tiny", TINY)), connector_config=EVICTING)
    with running_stack(options, daemon_settings={"KVTIER_DISK_KEY_FILE": str(keys)}) as stack:
        with stack.engine() as engine:
            reference = prefix_cache_hit(engine, PREFIX, QUESTION)
            stack.pin("p", PREFIX, engine)
            stack.wait_durable("p")
        stack.cli("export", "p", str(bundle), "--key-file", str(keys))
        assert b"kvtier.prompt" not in bundle.read_bytes()
        for key_ids in (("old",), ("new", "old"), ("new",)):
            write_keys(keys, *key_ids)
            stack.daemon.kill()
            stack.daemon.lose_memory()
            stack.daemon.start()
            with stack.engine() as engine:
                stack.wait_attached(engine)
                answer = ask(engine, [*PREFIX, *QUESTION])
            assert answer.by_source["disk"] == PREFIX_TOKENS, answer
            assert answer.text == reference.text
            wait_until(lambda: _writing_keys(stack) == {key_of_id(key_ids[0]).name}, HANG_S, "packs to be rewritten")  # noqa: B023
        write_keys(keys, "new", "old")
        stack.cli("import", str(bundle), "--name", "q", "--key-file", str(keys))
        stack.wait_durable("q")
        assert "writes" in stack.cli("status").stdout


def _writing_keys(stack: Stack) -> set[str]:
    return {key.name for key in stack.status().disk_keys if key.num_bytes}
