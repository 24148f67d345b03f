"""The console's files: all of them are in the wheel, they load nothing from elsewhere, and they are what is served."""

import re
from pathlib import Path

import httpx
import pytest

from kvtier.library.values.outcome_values import PinUsage
from kvtier.library.values.savings import Savings
from kvtier.obs.counters import Counters
from kvtier.obs.declare import declared
from kvtier.web.console.console_files import STATIC
from tests.unit.web.http_rig import served_door

ROOT = Path(__file__).parents[3]
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
_ELSEWHERE = re.compile(r"""(?:https?:|wss?:)?//[a-z0-9]""", re.IGNORECASE)
_NAMES_ONLY = ("http://www.w3.org/2000/svg",)
_IMPORT = re.compile(r"""(?m)^(?:import|export)\b[^;]*?\bfrom "([^"]+)";|^import "([^"]+)";|\bimport\("([^"]+)"\)""")


def text_of(name: str) -> str:
    return (STATIC / name).read_text()


def test_every_file_is_in_the_wheel() -> None:
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    packed = {each.distribution_path for each in builder.recurse_included_files()}

    assert {f"kvtier/web/static/{name}" for name in FILES} <= packed
    assert "index.html" in FILES


@pytest.mark.parametrize("name", FILES)
def test_a_file_names_nothing_that_is_elsewhere(name: str) -> None:
    text = re.sub(r"(?m)^\s*//.*$|\s// .*$", "", text_of(name))
    for known in _NAMES_ONLY:
        text = text.replace(known, "")

    assert _ELSEWHERE.findall(text) == []
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_a_module_imports_files_that_are_there_and_makes_no_html_of_text(name: str) -> None:
    text = text_of(name)
    for target in filter(None, (target for found in _IMPORT.findall(text) for target in found)):
        assert target.startswith("."), target
        assert ((STATIC / name).parent / target).resolve().is_file(), target
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser"):
        assert way not in text
    assert 'setAttribute("style"' not in text


def test_the_page_has_no_script_and_no_style_of_its_own() -> None:
    text = text_of("index.html")

    assert re.findall(r"<script(?![^>]*\ssrc=)", text) == []
    assert "<style" not in text
    assert re.findall(r"\s(?:style|on[a-z]+)=", text) == []


def test_the_disk_view_asks_for_counters_that_there_are() -> None:
    counters = Counters().as_dict()
    shown = re.findall(r"""(?m)^  \["(\w+)", "[^"]+"(?:, bytes)?\],$""", text_of("js/views/disk.js"))

    assert {"damaged_chunks_disk", "pack_writes_failed_write_back", "disk_read_bytes_scrub"} <= set(shown)
    assert [name for name in shown if not any(f"{each}_".startswith(f"{name}_") for each in counters)] == []


def test_saved_prefill_is_shown_as_it_is_counted() -> None:
    meanings = {name: found.meaning for name, found in declared(Counters)}

    assert "is not subtracted" in meanings["saved_prefill_seconds"]
    for text in (text_of("js/views/overview.js"), str(Savings.__doc__), str(PinUsage.__doc__)):
        assert "took is not subtracted" in text


def test_folders_of_modules_stay_small() -> None:
    folders: dict[Path, int] = {}
    for name in FILES:
        folders[Path(name).parent] = folders.get(Path(name).parent, 0) + 1

    assert max(folders.values()) <= 12, folders


def test_files_are_served_with_their_types_and_kept_by_browsers() -> None:
    with served_door() as door, httpx.Client(base_url=door.url, timeout=10) as client:
        page = client.get("/")
        again = client.get("/", headers={"If-None-Match": page.headers["etag"]})
        for name in FILES:
            answer = client.get(f"/static/{name}")
            assert (answer.status_code, answer.content) == (200, (STATIC / name).read_bytes())
        gone = [client.get(f"/static/{path}").status_code for path in ("", "nothing.js", "..%2f..%2fversion.py", "js")]

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert again.status_code == 304
    assert gone == [404] * 4
