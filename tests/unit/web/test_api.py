"""The API over a fake daemon: it answers what the library returns, and refuses as the daemon does."""

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from kvtier import Client
from kvtier.errors import PromptUnusableError
from kvtier.library.values.plain_json import to_jsonable
from kvtier.web.api.daemon_calls import json_bytes
from kvtier.web.problems import problem_of
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli import hostile
from tests.unit.cli.fake_vllm import FakeVllm
from tests.unit.web.http_rig import served_door

SYSTEM = "You are a parrot. " * 20


def without_start(value: dict[str, Any]) -> dict[str, Any]:
    """The fake starts at each question."""
    return {name: each for name, each in value.items() if name not in ("started_unix_s", "since_unix_s")}


def test_a_prompt_is_pinned_and_listed_as_the_library_has_it(
    api: httpx.Client, kvtier: Client, daemon: FakeCacheService
) -> None:
    wanted = {"system": SYSTEM, "ttl_s": 60, "priority": 3, "labels": {"team": "support"}}
    answer = api.put("/prompts/team%2Fbot", json=wanted)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["name"], answer.json()["state"]) == ("team/bot", "DURABLE")
    (request,) = daemon.pins
    assert (request.name, request.ttl_s, request.priority) == ("team/bot", 60, 3)
    assert api.get("/prompts/team%2Fbot").json() == to_jsonable(kvtier.get("team/bot"), with_recipe=True)
    assert api.get("/prompts").json() == {
        "prompts": [to_jsonable(each) for each in kvtier.list()],
        "next_page_token": "",
    }
    assert api.get("/prompts/team%2Fbot/tokens").json() == {"tokens": list(kvtier.tokens("team/bot"))}
    assert api.get("/prompts/team%2Fbot/chunks").json() == to_jsonable(kvtier.chunks("team/bot"))
    versions = [to_jsonable(each) for each in kvtier.history("team/bot")]
    assert api.get("/prompts/team%2Fbot/versions").json() == {"versions": versions}
    assert without_start(api.get("/status").json()) == without_start(to_jsonable(kvtier.status()))
    assert api.get("/readiness", params={"name": "team/bot"}).json()["ready"] is True


def test_every_source_may_be_pinned(api: httpx.Client, daemon: FakeCacheService) -> None:
    tools = [{"type": "function", "function": {"name": "fly"}}]
    messages = [{"role": "user", "content": "Hello, you parrot"}]
    assert api.put("/prompts/m", json={"messages": messages, "tools": tools}).status_code == 200
    assert json.loads(daemon.pins[-1].recipe_json)["tools"] == tools
    assert api.put("/prompts/x", json={"text": "Hello"}).json()["num_tokens"] == 5
    tokens = list(range(50_000))
    assert api.put("/prompts/t", json={"tokens": tokens, "warm": False}).json()["num_tokens"] == 50_000
    assert api.get("/prompts/t/tokens").json()["tokens"] == tokens


def test_a_caller_cannot_name_a_vllm_and_has_none_of_its_key(
    api: httpx.Client, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = api.put("/prompts/bot", json={"system": SYSTEM, "url": "http://127.0.0.1:1"})
    assert (answer.status_code, answer.json()["title"]) == (400, "InvalidArgumentError")
    assert answer.json()["detail"].startswith("url = ")
    assert vllm.requests == []


@pytest.mark.parametrize("version", [0, -1])
def test_a_rollback_to_a_version_that_cannot_be_names_it(
    api: httpx.Client, daemon: FakeCacheService, version: int
) -> None:
    api.put("/prompts/bot", json={"system": SYSTEM})
    answer = api.post("/prompts/bot/rollback", json={"version": version})
    assert (answer.status_code, answer.json()["title"]) == (400, "InvalidArgumentError")
    assert answer.json()["detail"].startswith(f"version = {version}: give the number of a version")
    assert len(daemon.pins) == 1


def test_lists_come_in_pages_and_are_filtered(api: httpx.Client, daemon: FakeCacheService, kvtier: Client) -> None:
    for number in range(25):
        owner = "a" if number % 2 else "b"
        kvtier.pin(f"p{number:02}", tokens=range(number, 100), owner=owner, labels={"n": str(number)}, warm=False)

    def names(**params: Any) -> list[str]:
        found, token = [], ""
        while True:
            page = api.get("/prompts", params={**params, "page_token": token, "page_size": 4}).json()
            assert len(page["prompts"]) <= 4
            found += [each["name"] for each in page["prompts"]]
            if not (token := page["next_page_token"]):
                return found

    everything = [f"p{number:02}" for number in range(25)]
    assert names() == everything
    assert names(owner="a") == everything[1::2]
    assert names(selector="n!=3,n!=4") == [name for name in everything if name not in ("p03", "p04")]
    assert names(state="durable") == []
    assert names(state=["durable", "waiting", "capturing"], owner="b") == everything[::2]
    refused = api.get("/prompts", params={"state": "gone"})
    assert (refused.status_code, "use one of" in refused.json()["detail"]) == (400, True)


def test_changes(api: httpx.Client, kvtier: Client, daemon: FakeCacheService) -> None:
    api.put("/prompts/bot", json={"system": SYSTEM})
    changed = api.patch("/prompts/bot", json={"ttl_s": 3600, "labels": {"tier": "1"}})
    assert (changed.json()["ttl_s"], changed.json()["labels"]) == (3600, {"tier": "1"})
    assert api.patch("/prompts/bot", json={"labels": {"tier": None}}).json()["labels"] == {}
    assert api.post("/prompts/bot/rename", json={"new_name": "parrot"}).json()["name"] == "parrot"
    made = api.put("/prompts/parrot", json={"system": SYSTEM + "!", "replace": True}).json()
    assert made["name"] == "parrot"
    assert [each["name"] for each in api.get("/prompts/parrot/versions").json()["versions"]] == ["parrot@1", "parrot"]
    assert api.post("/prompts/parrot/rollback").status_code == 200
    verified = api.post("/prompts/parrot/verify", json={"live": False}).json()
    assert verified["oracle"] == "checksums"
    refused = api.post("/prompts/parrot/evict")
    assert (refused.status_code, refused.json()["title"]) == (409, "PromptPinnedError")
    assert api.post("/prompts/parrot/unpin").json()["pinned"] is False
    assert api.post("/prompts/parrot/evict", json={"force": True}).json()["num_chunks"] >= 0
    assert api.post("/evict-all", json={"tier": "host"}).status_code == 200
    assert api.post("/evict-all", json={"namespace_id": ""}).status_code == 404


def test_a_ttl_slides_until_it_is_said_otherwise(api: httpx.Client, daemon: FakeCacheService) -> None:
    pinned = api.put("/prompts/bot", json={"system": SYSTEM, "ttl_s": 3600, "sliding": True})
    assert pinned.json()["sliding"] is daemon.pins[-1].sliding is True
    assert api.patch("/prompts/bot", json={"priority": 2}).json()["sliding"] is True
    assert api.patch("/prompts/bot", json={"sliding": False}).json()["sliding"] is False
    assert api.put("/prompts/bot", json={"system": SYSTEM, "sliding": True}).json()["sliding"] is True
    assert api.put("/prompts/bot", json={"system": SYSTEM, "sliding": False}).json()["sliding"] is False


def test_the_rest_answers_as_the_library(api: httpx.Client, kvtier: Client) -> None:
    assert api.get("/advice").json() == to_jsonable(kvtier.advise())
    assert api.get("/remote").json() == to_jsonable(kvtier.remote())
    assert without_start(api.get("/savings").json()) == without_start(to_jsonable(kvtier.savings()))
    assert api.get("/namespaces").json() == {"namespaces": [to_jsonable(each) for each in kvtier.namespaces()]}
    assert api.get("/engines").json() == {"engines": [to_jsonable(each) for each in kvtier.status().sessions]}
    assert api.get("/tiers").json()["disk"] == to_jsonable(kvtier.status().disk)
    assert api.get("/requests").json() == {"requests": []}
    assert api.get("/requests/none").status_code == 404
    assert api.get("/whoami").json()["role"] == "operator"
    explained = api.post("/explain", json={"tokens": [1, 2, 3]})
    assert explained.json() == to_jsonable(kvtier.explain(tokens=[1, 2, 3]))
    request = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}]}
    assert api.post("/explain", json={"request": request}).json() == to_jsonable(kvtier.explain(request))


def test_a_set_is_applied_from_the_body(api: httpx.Client, kvtier: Client) -> None:
    text = f"set: support\nprompts:\n- name: bot\n  system: {SYSTEM}\n"
    would = api.post("/apply", content=text, params={"dry_run": True}).json()
    assert [change["change"] for change in would["changes"]] == ["create"]
    assert kvtier.list() == []
    described = api.get("/../../openapi.json").json()["paths"]["/api/v1/apply"]["post"]["responses"]["200"]
    assert described["content"]["application/json"]["schema"]["properties"].keys() == would.keys()
    done = api.post("/apply", content=text).json()
    assert (len(done["changes"]), done["refused"]) == (1, [])
    as_json = json.dumps({"set": "support", "prompts": [{"name": "bot", "system": SYSTEM.strip()}]})
    assert api.post("/apply", content=as_json).json()["num_unchanged"] == 1
    pruned = api.post("/apply", content="set: support\nprompts: []\n", params={"prune": True}).json()
    assert [change["change"] for change in pruned["changes"]] == ["unpin"]


def test_an_applied_set_cannot_name_files_of_the_daemons_host(api: httpx.Client, kvtier: Client) -> None:
    for key in ("system_file", "messages_file", "text_file", "tokens_file"):
        refused = api.post("/apply", content=f"prompts:\n- name: bot\n  {key}: /etc/passwd\n")
        assert (refused.status_code, refused.json()["title"]) == (400, "DeclaredErrors")
        (error,) = refused.json()["errors"]
        assert (error["line"], error["field"]) == (3, f"prompts[0].{key}")
        assert "names a file, which no text may" in error["message"]
    assert kvtier.list() == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "title"),
    [
        ("GET", "/prompts/none", None, 404, "PromptNotFoundError"),
        ("PATCH", "/prompts/none", {"priority": 1}, 404, "PromptNotFoundError"),
        ("PUT", "/prompts/none", {}, 400, "InvalidArgumentError"),
        ("PUT", "/prompts/bot", {"system": "a", "text": "b"}, 400, "InvalidArgumentError"),
        ("PUT", "/prompts/bot", {"ttl_s": "1h"}, 400, "InvalidArgumentError"),
        ("PUT", "/prompts/bot", [1], 400, "InvalidArgumentError"),
        ("PUT", "/prompts/bot", {"tokens": ["a"]}, 400, "InvalidArgumentError"),
        ("PUT", "/prompts/bot", {"messages": "hello"}, 400, "InvalidArgumentError"),
        ("PUT", "/prompts/bot", {"system": "x", "model": "absent"}, 400, "InvalidArgumentError"),
        ("PUT", "/prompts/bot", {"tokens": 5}, 400, "InvalidArgumentError"),
        ("PUT", "/prompts/bot", {"tokens": [1], "warm": False, "ttl_s": -1}, 400, "InvalidArgumentError"),
        ("PATCH", "/prompts/bot", {"ttl_s": -(2**63)}, 400, "InvalidArgumentError"),
        ("PATCH", "/prompts/bot", {"priority": 2**40}, 400, "InvalidArgumentError"),
        (
            "POST",
            "/prompts/bot/adopt",
            {"automatic": "auto-1", "ttl_s": 2**64, "public": True},
            400,
            "InvalidArgumentError",
        ),
        ("POST", "/prompts/bot/rollback", {"version": -1}, 400, "InvalidArgumentError"),
        ("POST", f"/bundles?ttl_s={2**64}", None, 400, "InvalidArgumentError"),
        ("POST", "/explain", {"tokens": 5}, 400, "InvalidArgumentError"),
        ("POST", "/explain", {"tokens": ["a"]}, 400, "InvalidArgumentError"),
        ("POST", "/explain", {"tokens": [2**40]}, 400, "InvalidArgumentError"),
        ("POST", "/explain", {"request": [1]}, 400, "InvalidArgumentError"),
        ("GET", "/prompts?page_size=5000", None, 400, "InvalidArgumentError"),
        ("GET", "/history?span=year", None, 400, "InvalidArgumentError"),
        ("GET", "/history?name=none", None, 400, "InvalidArgumentError"),
        ("POST", "/explain", {}, 400, "InvalidArgumentError"),
        ("GET", "/requests?outcome=none", None, 400, "InvalidArgumentError"),
        ("DELETE", "/prompts/bot", None, 405, "MethodNotAllowedError"),
        ("GET", "/nothing", None, 404, "PathNotFoundError"),
        ("GET", "/prompts/", None, 404, "PathNotFoundError"),
        ("PUT", "/prompts/bot", {"text": "x" * (9 * 2**20)}, 400, "InvalidArgumentError"),
        ("POST", "/namespaces/none/quarantine", {"reason": "x"}, 404, "NamespaceNotFoundError"),
    ],
)
def test_what_is_refused_is_a_problem(
    api: httpx.Client, method: str, path: str, body: object, status: int, title: str
) -> None:
    answer = api.request(method, path, json=body)
    assert (answer.status_code, answer.json()["title"]) == (status, title), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert len(answer.json()["detail"]) > 10


def test_a_prompt_that_vllm_cannot_use_is_no_defect() -> None:
    """It was answered as 500, which clients send again, though it is pinned."""
    problem = problem_of(PromptUnusableError("prompt 'p' is registered, but vLLM cannot use it: it is too short"))
    assert (problem.status, problem.title) == (409, "PromptUnusableError")


@pytest.mark.parametrize("raw", [b"{", b"\xff", b'{"system": NaN}', b"[" * 300_000, b'{"a":' * 200 + b"1" + b"}" * 200])
def test_a_body_that_is_no_json_is_refused(api: httpx.Client, raw: bytes) -> None:
    answer = api.put("/prompts/bot", content=raw)
    assert (answer.status_code, answer.json()["title"]) == (400, "InvalidArgumentError"), answer.text


def test_no_vllm_is_said(api: httpx.Client, vllm: FakeVllm) -> None:
    vllm.statuses["/tokenize"] = 500
    answer = api.put("/prompts/bot", json={"system": SYSTEM})
    assert (answer.status_code, answer.json()["title"]) == (502, "RenderError")


def test_a_defect_is_a_problem_and_in_the_log(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(Client, "status", broken)
    answer = api.get("/status")
    assert (answer.status_code, answer.json()["title"]) == (500, "KeyError")
    assert "traceback" in answer.json()["detail"]
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]


def test_answers_are_as_the_description_says(api: httpx.Client, kvtier: Client) -> None:
    api.put("/prompts/bot", json={"system": SYSTEM})
    description = api.get("/../../openapi.json").json()
    assert api.get("/../../openapi.json").headers.get("cache-control") is None
    num_checked = 0
    for path, methods in description["paths"].items():
        get = methods.get("get")
        if get is None or "application/json" not in get["responses"]["200"]["content"] or "request_id" in path:
            continue
        answer = api.get(path.removeprefix("/api/v1").replace("{name}", "bot"))
        assert answer.status_code == 200, (path, answer.text)
        schema = get["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), schema | {"components": description["components"]})
        num_checked += 1
    assert num_checked >= 15
    for methods in description["paths"].values():
        for each in methods.values():
            assert each["description"], each
            assert each["operationId"]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": [1, 2], "b": [], "c": {"d": [{"e": list(range(10_000))}, {}]}},
        list(range(9000)),
        "é",
        None,
        [[{}]],
    ],
)
def test_json_is_that_of_pythons_encoder(value: Any) -> None:
    assert json.loads(json_bytes(value)) == json.loads(json.dumps(value))


def test_answers_with_every_field_are_as_the_description_says(tmp_path: Path) -> None:
    """Of a daemon that fills every field of every message, with text that is hostile to terminals."""
    with (
        hostile.serving(hostile.HostileDaemon(), tmp_path / "h"),
        served_door(socket=tmp_path / "h") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        description, not_asked = client.get("/openapi.json").json(), ("/apply", "/bundles", "/rollback")
        for path, methods in description["paths"].items():
            for method, each in methods.items():
                content = each["responses"]["200"].get("content", {}).get("application/json")
                if content is None or method not in ("get", "post") or path.endswith(not_asked):
                    continue
                bodies = {"/explain": {"tokens": [1]}, "/quarantine": {"reason": "x"}, "/rename": {"new_name": "y"}}
                bodies |= {"/adopt": {"automatic": "x", "public": True}, "/verify": {"live": False}}
                body = bodies.get(path[path.rindex("/") :])
                url = path.replace("{name}", "a%2Fb").replace("{namespace_id}", "n").replace("{request_id}", "r")
                answer = client.request(method, url, json=body)
                assert answer.status_code == 200, (url, answer.text)
                jsonschema.validate(answer.json(), content["schema"] | {"components": description["components"]})
