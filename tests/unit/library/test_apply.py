"""Declared prompts against a fake daemon and a fake vLLM: what differs, what is sent, and what is said."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvtier import Client, KvtierError, PromptState
from kvtier.library import progress_events as events
from kvtier.library.declared import ChangeKind, DeclaredErrors
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.fake_vllm import FakeVllm, thinking_template

SYSTEM = "You are a parrot. " * 20
UNUSED_URL = "http://127.0.0.1:9"
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> str:
        path = tmp_path / "prompts.yaml"
        path.write_text(text)
        return str(path)

    return write_file


def two(first: str = SYSTEM, how: str = "") -> str:
    return f"""
prompts:
  - {{name: a, system: "{first}"{how}}}
  - {{name: b, text: "Once upon a time there was a parrot. It sang."}}
"""


def kinds(client: Client, path: str, *, prune: bool = False) -> dict[str, str]:
    return {change.name: change.kind.value for change in client.apply(path, prune=prune, dry_run=True).changes}


def test_what_is_new_is_rendered_pinned_at_once_and_computed(
    kvtier: Client, daemon: FakeCacheService, write: Write
) -> None:
    seen: list[events.Progress] = []
    done = kvtier.apply(write(two()), on_progress=seen.append)
    assert [(change.name, change.kind) for change in done.changes] == [("a", "create"), ("b", "create")]
    assert (list(done.unrendered), list(done.incomplete), done.changed) == ([], [], True)
    assert {prompt.name: prompt.state for prompt in kvtier.list()} == dict.fromkeys("ab", PromptState.DURABLE)
    assert [event.name for event in seen if isinstance(event, events.Rendered)] == ["a", "b"]
    assert kvtier.get("a").labels == {"kvtier/set": "default"}
    # Again: nothing is sent.
    num_pins = len(daemon.pins)
    assert not kvtier.apply(write(two())).changed
    assert len(daemon.pins) == num_pins


def test_what_was_applied_and_not_computed_is_computed_by_the_next_apply(
    kvtier: Client, daemon: FakeCacheService, write: Write
) -> None:
    kvtier.apply(write(two()))
    changed = write(two(first=SYSTEM + "You also sing. ").replace("name: b", "name: c"))
    assert list(kvtier.apply(changed, warm=False).incomplete) == []
    assert kvtier.get("a").replacement == "a@2"
    assert kvtier.get("c").state is PromptState.CAPTURING
    num_pins = len(daemon.pins)
    kvtier.apply(changed, dry_run=True)
    assert kvtier.get("c").state is PromptState.CAPTURING

    done = kvtier.apply(changed)

    assert (done.changed, list(done.incomplete)) == (False, [])
    assert [prompt.name for prompt in kvtier.history("a")] == ["a@1", "a"]
    assert kvtier.get("c").state is PromptState.DURABLE
    assert len(daemon.pins) == num_pins


def test_without_vllm_what_waits_goes_on_waiting_and_that_is_said(kvtier: Client, tmp_path: Path, write: Write) -> None:
    path = write(two())
    kvtier.apply(path, warm=False)
    seen: list[events.Progress] = []
    with Client(tmp_path / "s", url=UNUSED_URL) as client:
        assert not client.apply(path, on_progress=seen.append).changed
    assert [type(event) for event in seen] == [events.NotRendered]
    assert {prompt.state for prompt in kvtier.list()} == {PromptState.CAPTURING}


def test_differences_are_by_field_and_by_content(kvtier: Client, write: Write) -> None:
    kvtier.apply(write(two()))
    assert kinds(kvtier, write(two(how=", priority: 3, labels: {x: y}"))) == {"a": "update", "b": "unchanged"}
    (change,) = (each for each in kvtier.apply(write(two(how=", priority: 3"))).changes if each.name == "a")
    assert change.fields == {"priority": (0, 3)}
    assert kvtier.get("a").priority == 3
    kvtier.set("a", owner="someone")
    assert kinds(kvtier, write(two(how=", priority: 3"))) == {"a": "update", "b": "unchanged"}
    for other in (two(first=SYSTEM + "!"), two(how=", cache_salt: s"), two(how=", tools: [{type: function}]")):
        assert kinds(kvtier, write(other))["a"] == "replace"
    kvtier.unpin("a")
    assert kinds(kvtier, write(two()))["a"] == "create"


def test_a_durable_pin_is_replaced_by_a_version(kvtier: Client, write: Write) -> None:
    kvtier.apply(write(two()))
    before = kvtier.tokens("a")
    kvtier.apply(write(two(first=SYSTEM + "You also sing. ")))
    assert kvtier.tokens("a") != before
    assert [prompt.name for prompt in kvtier.history("a")] == ["a@1", "a"]


def test_pruning_ends_pins_of_the_same_set_only(kvtier: Client, write: Write) -> None:
    kvtier.pin("by-hand", system=SYSTEM, warm=False)
    kvtier.apply(write(two()))
    kvtier.apply(write('set: other\nprompts: [{name: c, system: "Hello, parrot, how are you today?"}]'))
    only_b = '{prompts: [{name: b, text: "Once upon a time there was a parrot. It sang."}]}'
    assert kinds(kvtier, write(only_b)) == {"b": "unchanged"}
    assert kvtier.apply(write(only_b)).not_in_files == ["a"]
    assert kvtier.apply(write(only_b), prune=True, dry_run=True).not_in_files == []
    assert kinds(kvtier, write(only_b), prune=True) == {"a": "unpin", "b": "unchanged"}
    kvtier.apply(write(only_b), prune=True)
    assert {prompt.name: prompt.pinned for prompt in kvtier.list()} == {
        "a": False,
        "b": True,
        "by-hand": True,
        "c": True,
    }


def test_without_vllm_sources_are_kept_and_a_later_apply_renders_them(
    daemon: FakeCacheService, vllm: FakeVllm, tmp_path: Path, write: Write
) -> None:
    path = write(two())
    with Client(tmp_path / "s", url=UNUSED_URL) as client:
        done = client.apply(path)
        assert list(done.unrendered) == ["a", "b"]
        assert {prompt.state for prompt in client.list()} == {PromptState.UNRENDERED}
        again = client.apply(path)
        assert (again.changed, list(again.unrendered)) == (False, ["a", "b"])
    with Client(tmp_path / "s", url=vllm.url) as client:
        done = client.apply(path)
        assert (done.changed, list(done.unrendered)) == (False, [])
        assert {prompt.state for prompt in client.list()} == {PromptState.DURABLE}


def test_a_model_that_this_vllm_does_not_serve_is_left_to_another(kvtier: Client, write: Write) -> None:
    done = kvtier.apply(write(two(how=", model: elsewhere")))
    assert list(done.unrendered) == ["a"]
    assert kvtier.get("a").state is PromptState.UNRENDERED
    assert kvtier.get("b").state is PromptState.DURABLE


def test_a_second_name_of_a_model_is_no_difference(kvtier: Client, vllm: FakeVllm, write: Write) -> None:
    """With `--served-model-name toy second` each apply replaced what the one before had made."""
    vllm.models.append({"id": "second", "root": "/models/toy", "parent": None})
    path = write(two(how=", model: second"))
    assert kvtier.apply(path).changed
    assert kvtier.get("a").model == "toy", "engines know the first name"
    assert not kvtier.apply(path).changed
    assert kinds(kvtier, write(two(how=", model: second, priority: 3"))) == {"a": "update", "b": "unchanged"}
    vllm.models[1]["root"] = "/models/other"
    assert kinds(kvtier, path) == {"a": "replace", "b": "unchanged"}


def test_what_vllm_refuses_stops_all_of_it(kvtier: Client, vllm: FakeVllm, write: Write) -> None:
    vllm.models[0]["max_model_len"] = 100
    with pytest.raises(DeclaredErrors) as caught:
        kvtier.apply(write(two()))
    (error,) = caught.value.errors
    assert "prompts.yaml:3:5: a: has 3" in str(error)
    assert "takes 100 with the answer" in str(error)
    assert kvtier.list() == []


def test_what_is_exported_is_applied_without_a_difference(
    kvtier: Client, vllm: FakeVllm, tmp_path: Path, write: Write
) -> None:
    vllm.template = thinking_template
    kvtier.apply(write(two(how=", ttl: 90m, sliding: true, owner: o, labels: {x: y}, priority: 2")))
    messages = [{"role": "system", "content": 'Say "yes".\n\tOr: no\n'}, {"role": "user", "content": "…"}]
    kvtier.pin(
        "m",
        messages=messages,
        tools=[{"type": "function"}],
        chat_template_kwargs={"enable_thinking": False},
        warm=False,
    )
    kvtier.pin("t", tokens=range(1000, 1040), warm=False)
    kvtier.apply(write("set: special\nprompts: [{name: s, system: 'x: y # z'}]"), warm=False)
    kvtier.pin("ended", tokens=range(40), warm=False)
    kvtier.unpin("ended")
    text = kvtier.export_config()
    exported = tmp_path / "exported.yaml"
    exported.write_text(text)
    done = kvtier.apply(str(exported), dry_run=True)
    assert {change.kind for change in done.changes} == {ChangeKind.UNCHANGED}
    assert [(each.get("set", "default"), len(each["prompts"])) for each in yaml.safe_load_all(text)] == [
        ("default", 2), ("", 2), ("special", 1)
    ]  # fmt: skip
    assert {change.name for change in done.changes} == {"a", "b", "m", "s", "t"}
    assert "ended" not in text
    assert "name: m" in kvtier.export_config("m")


def test_a_prompt_of_another_set_is_taken_over_only_when_that_is_asked_for(kvtier: Client, write: Write) -> None:
    """Two teams with one name changed each other's prompt, apply by apply."""
    kvtier.apply(write(f"set: ours{two()}"))
    kvtier.pin("by-hand", system=SYSTEM, warm=False)
    theirs = write(f"set: theirs{two(how=', priority: 3')}  - {{name: by-hand, system: Hello parrot}}\n")
    for dry_run in (True, False):
        with pytest.raises(DeclaredErrors) as caught:
            kvtier.apply(theirs, dry_run=dry_run)
        assert [str(error).partition("prompts.yaml")[2] for error in caught.value.errors] == [
            f":{line}:5: {name}: belongs to the set 'ours', and this file is of the set 'theirs'; take it out of the "
            "file, or move it here with --take-over"
            for line, name in ((3, "a"), (4, "b"))
        ]
        assert (kvtier.get("a").priority, kvtier.get("a").labels) == (0, {"kvtier/set": "ours"})
    kvtier.apply(theirs, take_over=True)
    assert (kvtier.get("a").priority, kvtier.get("a").labels) == (3, {"kvtier/set": "theirs"})
    assert kvtier.get("by-hand").labels == {"kvtier/set": "theirs"}, "what no set has is not refused"
    # What ended is no one's.
    kvtier.unpin("a")
    kvtier.apply(write("set: ours\nprompts: [{name: a, system: Hello parrot}]"))
    # Of no set.
    with pytest.raises(DeclaredErrors, match="and this file is of no set"):
        kvtier.apply(write("set: ''\nprompts: [{name: a, system: Hello parrot}]"))
    kvtier.set("a", labels={"kvtier/set": None})
    assert not kvtier.apply(write("set: ''\nprompts: [{name: a, system: Hello parrot}]"), prune=True).changed


def test_labels_of_kvtier_are_not_a_user_s(kvtier: Client, write: Write) -> None:
    says = "labels that begin with kvtier/ are kvtier's own; choose another key"
    with pytest.raises(KvtierError, match=says):
        kvtier.pin("a", system=SYSTEM, labels={"kvtier/set": "x"}, warm=False)
    kvtier.pin("a", system=SYSTEM, warm=False)
    with pytest.raises(KvtierError, match=says):
        kvtier.set("a", labels={"kvtier/x": "y"})
    with pytest.raises(DeclaredErrors, match=rf"prompts\[0\].labels: {says}"):
        kvtier.apply(write("prompts: [{name: a, system: x, labels: {kvtier/set: y}}]"))
