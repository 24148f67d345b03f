"""Files of prompts: what they may say, and every mistake in them at once, with its place."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.core import limits
from kvtier.library.declared import DeclaredErrors, DeclaredSet, json_schema, read_declared, read_declared_text
from kvtier.library.declared.documents import MAX_VALUES
from kvtier.library.rendering.recipe import SourceKind

Read = Callable[[str], DeclaredSet]
Mistakes = Callable[[str], list[str]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read a file with this text."""

    def read_text(text: str) -> DeclaredSet:
        (tmp_path / "p.yaml").write_text(text)
        return read_declared([str(tmp_path / "p.yaml")])

    return read_text


@pytest.fixture
def mistakes(read: Read, tmp_path: Path) -> Mistakes:
    """Return the errors of a file with this text, without its folder."""

    def errors(text: str) -> list[str]:
        with pytest.raises(DeclaredErrors) as caught:
            read(text)
        return [str(error).replace(f"{tmp_path}/", "") for error in caught.value.errors]

    return errors


def test_all_that_a_prompt_may_have(read: Read, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "sys.txt").write_text("You are brief.\n")
    (tmp_path / "request.json").write_text(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function"}]})
    )
    (tmp_path / "ids.json").write_text('{"tokens": [1, 2, 3]}')
    declared = read("""
set: team-a
defaults: {owner: support, labels: {team: support, tier: "1"}, ttl: 7d}
prompts:
  - name: by-file
    system_file: texts/sys.txt
    tools: [{type: function, function: {name: fly}}]
    chat_template_kwargs: {enable_thinking: false}
    model: llama
    cache_salt: pepper
    sliding: true
    priority: -5
    labels: {tier: "2"}
  - {name: request, messages_file: request.json, ttl: never, public: true, owner: ""}
  - {name: ids, tokens_file: ids.json}
  - {name: text, text: "Once upon"}
---
prompts: [{name: other-set, system: Hello}]
""")
    assert declared.set_names == {"team-a", "default"}
    first = declared.prompts["by-file"]
    assert (first.recipe.kind, first.recipe.content) == (SourceKind.SYSTEM, "You are brief.\n")
    assert first.recipe.chat_template_kwargs == {"enable_thinking": False}
    assert (first.model, first.cache_salt, first.ttl_s, first.sliding) == ("llama", "pepper", 7 * 86400, True)
    assert (first.priority, first.owner) == (-5, "support")
    assert first.labels == {"team": "support", "tier": "2", "kvtier/set": "team-a"}
    assert (first.source, first.line, first.column) == (str(tmp_path / "p.yaml"), 5, 5)
    request = declared.prompts["request"]
    assert request.recipe.tools == [{"type": "function"}]
    assert (request.ttl_s, request.public, request.owner) == (0, True, "")
    assert declared.prompts["ids"].tokens == (1, 2, 3)
    assert declared.prompts["other-set"].labels == {"kvtier/set": "default"}
    assert "brief" not in repr(first), "no text of a prompt in logs"


def test_every_mistake_of_a_file_is_said_with_its_place(mistakes: Mistakes) -> None:
    assert mistakes("""prompts:
  - name: a
    system: hi
    prioity: 3
  - name: two words
    system: x
  - {name: b, text: x, system: y}
  - {name: none}
  - {name: c, system: z, ttl: 5 parsecs}
  - {name: d, messages: [{role: alien, content: x}]}
  - {name: e, text: x}
  - {name: e, text: x}
  - {name: f, system: yes}
  - {name: g, system_file: nowhere.txt}
  - {name: h, system: " "}
  - {name: i, system: x, sliding: true, ttl: never}
  - {name: j, system: x, public: true, cache_salt: s}
  - {name: k, text: x, tools: [{}]}
  - {name: l, system: x, tools: [{}], tools_file: t}
  - {name: m, system: x, labels: {"bad key": v}}
  - {name: n@2, system: x}
  - {name: o, system: x, priority: 101}
  - {name: p, tokens: [1, -1]}
  - 7
  - {system: x}
defaults: {ttl: soon, colour: red}
zzzzzz: 1
""") == [
        "p.yaml:4:5: prompts[0].prioity: no such key; did you mean priority?",
        "p.yaml:5:11: prompts[1].name = 'two words': use 1 to 128 letters, digits and . _ / @ -, beginning with a "
        "letter or digit",
        "p.yaml:7:12: prompts[2].name = 'b': has system and text; give one of system, system_file, messages, "
        "messages_file, text, text_file, tokens, tokens_file",
        "p.yaml:8:12: prompts[3].name = 'none': has none; give one of system, system_file, messages, messages_file, "
        "text, text_file, tokens, tokens_file",
        """p.yaml:9:31: prompts[4].ttl = '5 parsecs': must be a duration like "90s", "30m", "12h", "7d" or "2w", at """
        """most 36500d, or "never\"""",
        "p.yaml:10:33: prompts[5].messages[0].role = 'alien': must be one of system, developer, user, assistant, tool",
        "p.yaml:12:12: prompts[7].name = 'e': is the name of the prompt at p.yaml:11:5, too; give each prompt another "
        "name",
        "p.yaml:13:23: prompts[8].system: must be text; put it in quotes",
        "p.yaml:14:28: prompts[9].system_file = 'nowhere.txt': cannot be read: No such file or directory",
        "p.yaml:15:23: prompts[10].system: is empty; there is nothing to pin",
        "p.yaml:16:35: prompts[11].sliding = 'true': needs a ttl: the time from each use to the end",
        "p.yaml:17:34: prompts[12].public = 'true': a public prompt has no cache_salt; leave one out",
        "p.yaml:18:31: prompts[13].tools: goes with system or messages only",
        "p.yaml:19:51: prompts[14].tools_file = 't': cannot go with tools; give one of them",
        "p.yaml:19:51: prompts[14].tools_file = 't': cannot be read: No such file or directory",
        "p.yaml:20:34: prompts[15].labels: a label's key has 1 to 128 letters, digits and . _ / -, beginning with a "
        "letter or digit",
        "p.yaml:21:12: prompts[16].name = 'n@2': names that end in @ and a number are those of versions; choose "
        "another",
        "p.yaml:22:36: prompts[17].priority = '101': must be at most 100",
        "p.yaml:23:27: prompts[18].tokens[1]: must be a token id, a whole number from 0",
        "p.yaml:24:5: prompts[19]: must be a table of keys and values",
        "p.yaml:25:5: prompts[20]: needs the key name",
        """p.yaml:26:17: defaults.ttl = 'soon': must be a duration like "90s", "30m", "12h", "7d" or "2w", at most """
        """36500d, or "never\"""",
        "p.yaml:26:23: defaults.colour: no such key; known: model, cache_salt, ttl, sliding, priority, public, "
        "owner, labels",
        "p.yaml:27:1: zzzzzz: no such key; known: set, defaults, prompts",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompts: [", "p.yaml:2:1: is no YAML: did not find expected node content"),
        ("a: 1\na: 2\n", "p.yaml:2:1: a: comes twice; leave one out"),
        ("prompts: 2026-11-25\n", "p.yaml:1:10: prompts: is read as timestamp; put it in quotes"),
        ("prompts:\n- <<: {a: b}\n", "must have plain keys; write merged keys out"),
        ("? [a]\n: b\n", "must have plain keys"),
        ("- a\n", "p.yaml:1:1: must be a table of keys and values"),
        ("x: !!binary aGk=\n", "is read as binary"),
        ("a: &a [*a]\n", "has too much in it"),
        ("[" * 100 + "]" * 100, "has too much in it"),
        ("x: \x01\n", "is no YAML"),
        ("x: !!bool maybe\n", "p.yaml:1:4: x: cannot be read as bool; put text in quotes, without a tag"),
        ('priority: !!int ""\n', "p.yaml:1:11: priority = '': cannot be read as int"),
        ("x: !!float SECRET\n", "p.yaml:1:4: x: cannot be read as float; put text in quotes, without a tag"),
        ("prompts: 3\n", "p.yaml:1:10: prompts: must be a list"),
    ],
)
def test_what_is_no_file_of_prompts(mistakes: Mistakes, text: str, said: str) -> None:
    (error, *_) = mistakes(text)
    assert said in error


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000], ids=["lists", "tables", "items"])
def test_a_file_that_nests_without_end_ends_no_process(tmp_path: Path, text: str) -> None:
    """libyaml's reader called itself for each bracket: 40,000 of them ended `kvtier apply` with SIGSEGV."""
    (tmp_path / "p.yaml").write_text(text)
    code = "import sys; from kvtier.library.declared import read_declared; read_declared(sys.argv[1:])"
    command = [sys.executable, "-c", code, str(tmp_path / "p.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "nest too deep" in done.stderr


def test_aliases_that_multiply_are_refused_before_they_fill_the_memory(mistakes: Mistakes) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    (error,) = mistakes("\n".join(lines))
    assert "aliases multiply" in error
    assert MAX_VALUES < 10**7


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"prompts: [{name: a, system: \xe9}]")
    (tmp_path / "empty").mkdir()
    paths = [str(tmp_path / name) for name in ("none.yaml", "latin.yaml", "empty", "nul\0", "prompts: [" * 30)]
    with pytest.raises(DeclaredErrors) as caught:
        read_declared(paths)
    said = [str(error) for error in caught.value.errors]
    assert [each.rpartition(": ")[2] for each in said[:1]] == ["No such file or directory"]
    assert "is not UTF-8 text (byte 28)" in said[1]
    assert "is a folder without .yaml, .yml, .json files" in said[2]
    assert "cannot be read" in said[3]
    assert "cannot be read: File name too long" in said[4], '`-f "$(cat prompts.yaml)"` was a traceback'
    assert len(said) == 5


def test_a_folder_is_its_files_and_json_is_yaml(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps({"prompts": [{"name": "b", "system": "tab\there"}]}))
    (tmp_path / "a.yml").write_text("prompts: [{name: a, system: x}]")
    (tmp_path / "notes.txt").write_text("no prompts")
    (tmp_path / "deeper.yaml").mkdir()
    declared = read_declared([str(tmp_path)])
    assert set(declared.prompts) == {"a", "b"}
    assert declared.prompts["b"].recipe.content == "tab\there"


def test_a_link_in_a_folder_that_leads_nowhere_is_a_mistake(tmp_path: Path) -> None:
    """It was passed over, and `apply --prune` ended the pins of the file that was not there."""
    (tmp_path / "a.yaml").write_text("prompts: [{name: a, system: x}]")
    (tmp_path / ".#a.yaml").symlink_to("someone@host.4711:1700000000")  # as Emacs does
    assert set(read_declared([str(tmp_path)]).prompts) == {"a"}
    (tmp_path / "b.yaml").symlink_to("not-mounted/b.yaml")
    with pytest.raises(DeclaredErrors) as caught:
        read_declared([str(tmp_path)])
    assert str(caught.value) == f"{tmp_path / 'b.yaml'}: cannot be read: No such file or directory"


def test_a_file_that_is_empty_declares_nothing(read: Read) -> None:
    assert not read("# nothing yet\n").prompts
    assert read("prompts: []\n").set_names == {"default"}
    assert read("set: ''\nprompts: []\n").set_names == frozenset()


def test_the_schema_agrees_with_the_reader(tmp_path: Path) -> None:
    """Editors check by it: what it has no key for, the reader refuses, and the other way round."""
    schema = json_schema()
    entry: dict[str, Any] = schema["$defs"]["PromptEntry"]
    assert schema["properties"].keys() == {"set", "defaults", "prompts"}
    assert entry["required"] == ["name"]
    assert len(entry["oneOf"]) == 8
    for name in entry["properties"]:
        assert f"{name}: Annotated" in _source_of_schema()
    assert json.loads(json.dumps(schema)) == schema


def _source_of_schema() -> str:
    return (Path(__file__).parents[3] / "kvtier" / "library" / "declared" / "file_schema.py").read_text()


def test_standard_input_is_a_file(tmp_path: Path) -> None:
    code = "from kvtier.library.declared import read_declared; print(sorted(read_declared(['-']).prompts))"
    text = "prompts: [{name: a, system: x}]"
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, env=os.environ)
    assert done.stdout == "['a']\n", done.stderr


def test_errors_quote_no_text_of_a_prompt(mistakes: Mistakes) -> None:
    """A wrong key beside a secret text, and a text where a table is expected."""
    said = "\n".join(
        mistakes("""prompts:
  - {name: a, sytem: SECRET}
  - SECRET
  - {name: b, system: "\\uFEFFSECRET"}
  - {name: c, system: !!binary SECRET}
""")
        + mistakes("prompts: SECRET\n")
        + mistakes("prompts: [{name: a, system: x, cache_salt: [SECRET]}]")
    )
    assert "SECRET" not in said
    assert "prompts: must be a list" in said, "or --prune would end every pin of the set"


def test_json_with_characters_in_two_escapes(tmp_path: Path) -> None:
    """As json.dumps writes them."""
    text = json.dumps({"prompts": [{"name": "a", "system": 'Smile \U0001f600, and \\ud83d\\ude00 "as it is"'}]})
    (tmp_path / "p.json").write_text(text)
    declared = read_declared([str(tmp_path / "p.json")])
    assert declared.prompts["a"].recipe.content == 'Smile \U0001f600, and \\ud83d\\ude00 "as it is"'


def test_one_prompt_may_have_very_many_tokens(read: Read) -> None:
    num = MAX_VALUES + 10
    assert len(read(f"prompts: [{{name: a, tokens: [{'1,' * num}]}}]").prompts["a"].tokens) == num


def test_a_set_has_a_label_too(mistakes: Mistakes) -> None:
    labels = ", ".join(f"k{number}: v" for number in range(32))
    (error,) = mistakes(f"prompts: [{{name: a, system: x, labels: {{{labels}}}}}]")
    assert "has 33 labels with that of its set" in error


def test_all_mistakes_of_one_prompt_are_said_at_once(mistakes: Mistakes, tmp_path: Path) -> None:
    """What was wrong by itself hid what was wrong together, and the first message hid the others."""
    (tmp_path / "tools.json").write_text('[{"type": "function"},\n  }]')
    assert mistakes("""defaults: {ttl: soon, labels: {"a b": c}}
prompts:
  - name: a
    messages: [{role: alien, content: x}, {role: user}, {role: user, content: x}]
    priority: -101
    public: true
    cache_salt: s
    sliding: 1
  - name: two words
    system_file: none.txt
    tools_file: tools.json
    tools: [{}]
    public: "yes"
    priority: high
  - {name: b, text: x, text_file: "", sliding: true}
set: "my set"
""") == [
        """p.yaml:1:17: defaults.ttl = 'soon': must be a duration like "90s", "30m", "12h", "7d" or "2w", at most """
        """36500d, or "never\"""",
        "p.yaml:1:31: defaults.labels: a label's key has 1 to 128 letters, digits and . _ / -, beginning with a letter "
        "or digit",
        "p.yaml:4:23: prompts[0].messages[0].role = 'alien': must be one of system, developer, user, assistant, tool",
        "p.yaml:4:43: prompts[0].messages[1].content: must be text, or a list of content parts",
        "p.yaml:5:15: prompts[0].priority = '-101': must be at least -100",
        "p.yaml:6:13: prompts[0].public = 'true': a public prompt has no cache_salt; leave one out",
        "p.yaml:8:14: prompts[0].sliding = '1': must be true or false",
        "p.yaml:9:11: prompts[1].name = 'two words': use 1 to 128 letters, digits and . _ / @ -, beginning with a "
        "letter or digit",
        "p.yaml:10:18: prompts[1].system_file = 'none.txt': cannot be read: No such file or directory",
        "p.yaml:11:17: prompts[1].tools_file = 'tools.json': cannot go with tools; give one of them",
        "p.yaml:11:17: prompts[1].tools_file = 'tools.json': tools.json:2:3: is not valid JSON: Expecting value at "
        "line 2, column 3",
        "p.yaml:13:13: prompts[1].public = 'yes': must be true or false",
        "p.yaml:14:15: prompts[1].priority = 'high': must be a whole number",
        "p.yaml:15:12: prompts[2].name = 'b': has text and text_file; give one of system, system_file, messages, "
        "messages_file, text, text_file, tokens, tokens_file",
        "p.yaml:15:35: prompts[2].text_file = '': must not be empty",
        "p.yaml:16:6: set = 'my set': use at most 128 letters, digits and . _ / @ : + -",
    ]  # fmt: skip


def test_a_folder_with_what_its_prompts_are_made_of(tmp_path: Path) -> None:
    """The tools beside a file of prompts were read as a file of prompts."""
    (tmp_path / "p.yaml").write_text("prompts: [{name: a, system: x, tools_file: tools.json}]")
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    assert read_declared([str(tmp_path)]).prompts["a"].recipe.tools == [{"type": "function"}]
    (tmp_path / "tools.json").write_text('[{"type": "function"}\n  {}]')
    (tmp_path / "other.json").write_text('{"prompts":\n [}')
    with pytest.raises(DeclaredErrors) as caught:
        read_declared([str(tmp_path)])
    assert [str(error).replace(f"{tmp_path}/", "") for error in caught.value.errors] == [
        "other.json:2:3: is not valid JSON: Expecting value at line 2, column 3",
        "p.yaml:1:44: prompts[0].tools_file = 'tools.json': tools.json:2:3: is not valid JSON: Expecting ',' delimiter "
        "at line 2, column 3",
    ]


def test_a_file_that_is_given_twice_and_a_name_in_two_files(tmp_path: Path) -> None:
    """Each prompt of the file was an error."""
    (tmp_path / "a.yaml").write_text("prompts: [{name: x, system: a}, {name: y, system: a}]")
    (tmp_path / "b.yaml").write_text("prompts:\n- {name: x, system: b}")
    a, b = str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")
    with pytest.raises(DeclaredErrors) as caught:
        read_declared([a, a, f"{tmp_path}/../{tmp_path.name}/a.yaml", b])
    assert [str(error).replace(f"{tmp_path}/", "") for error in caught.value.errors] == [
        "a.yaml: is given twice; name it once",
        f"../{tmp_path.name}/a.yaml: is the same file as a.yaml, which is given too; name it once",
        "b.yaml:2:10: prompts[0].name = 'x': is the name of the prompt at a.yaml:1:11, too; give each prompt another "
        "name",
    ]
    with pytest.raises(DeclaredErrors, match="is given twice"):
        read_declared([str(tmp_path), a])


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    (tmp_path / "b.yaml").write_text("prompts: []")
    assert read_declared([str(tmp_path)]).empty_files == [str(tmp_path / "a.yaml")]


def test_json_is_read_by_the_rules_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML 1.1 reads `1e3` as text and folds a next line character: vLLM rendered other tokens than for requests."""
    text = """{"prompts": [{"name": "a", "system": "one\u0085two", "tools": [{"type": "function", "x": 1.5E5}],
        "chat_template_kwargs": {"budget": 1e3, "least": 1e-05, "yes": "no", "many": [1, 2.0]}}]}"""
    (tmp_path / "p.json").write_text(text)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    for declared in (read_declared([str(tmp_path / "p.json")]), read_declared(["-"]), read_declared_text(text)):
        recipe = declared.prompts["a"].recipe
        assert recipe.content == "one\u0085two"
        assert recipe.tools == [{"type": "function", "x": 1.5e5}]
        assert recipe.chat_template_kwargs == {"budget": 1000.0, "least": 1e-05, "yes": "no", "many": [1, 2.0]}
        assert (declared.prompts["a"].line, declared.prompts["a"].column) == (1, 14)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompts": [{"name": "a", "system": "x", "priority": 1e3}]}', ":1:55: prompts[0].priority = '1e3': must be"),
        ('{"prompts": [{"name": "a", "name": "b"}]}', ":1:28: prompts[0].name: comes twice; leave one out"),
        ('{"prompts": [NaN]}', ": has NaN, which is no JSON"),
        ('{"prompts": [],}', ":1:16: is not valid JSON"),
        (f'{{"prompts": {"[" * 70}{"]" * 70}}}', "has too much in it: lists or tables nest too deep"),
    ],
)
def test_mistakes_in_json_have_their_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(DeclaredErrors) as caught:
        read_declared([str(tmp_path / "p.json")])
    assert said in str(caught.value)


def test_json_with_a_byte_order_mark_and_a_flow_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('\ufeff{"prompts": [{"name": "a", "system": "x"}]}')
    assert set(read_declared([str(tmp_path / "p.json")]).prompts) == {"a"}
    assert set(read_declared_text("{prompts: [{name: a, system: x}]}").prompts) == {"a"}
    (tmp_path / "empty.json").write_text("\n")
    assert read_declared([str(tmp_path / "empty.json")]).empty_files == [str(tmp_path / "empty.json")]


def test_a_source_that_is_too_long_is_a_mistake_of_its_prompt(mistakes: Mistakes, tmp_path: Path) -> None:
    """It was `Exception iterating requests!` of gRPC, with a traceback."""
    (tmp_path / "long.txt").write_text("x" * (limits.RECIPE.max_bytes + 1))
    (tmp_path / "ids.json").write_text(json.dumps([1] * (limits.MAX_TOKENS + 1)))
    assert mistakes("""prompts:
  - {name: a, system_file: long.txt}
  - {name: b, tokens_file: ids.json}
  - {name: c, system: x}
""") == [
        "p.yaml:2:28: prompts[0].system_file = 'long.txt': has 8388656 bytes; with tools and kwargs at most 8388608 "
        "are supported",
        "p.yaml:3:28: prompts[1].tokens_file = 'ids.json': has 1048577 of them; at most 1048576 are supported",
    ]
