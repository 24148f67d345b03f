"""The chart of `make demo` tells the truth: bars are as long as what they stand for."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.measuring.charts.bar_chart import Bar, draw_chart

RED, GREEN, BLUE = "#ff0000", "#00ff00", "#0000ff"


def bar(value_s: float, color: str) -> Bar:
    # The note has the bar's colour: without one, only the bar has.
    return Bar(label="something", note="", value_s=value_s, color=color)


def longest_run(image: Image.Image, color: str) -> int:
    """Return the widest row of pixels of exactly this colour."""
    pixels = image.convert("RGB")
    wanted = tuple(bytes.fromhex(color[1:]))
    rows = [bytes(pixels.crop((0, y, pixels.width, y + 1)).tobytes()) for y in range(pixels.height)]
    return max(sum(tuple(row[x : x + 3]) == wanted for x in range(0, len(row), 3)) for row in rows)


def test_bars_are_to_scale_and_begin_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "new" / "chart.png"
    draw_chart("title", "subtitle", [bar(5.0, RED), bar(2.5, GREEN), bar(0.5, BLUE)], ["footer"], path)
    with Image.open(path) as image:
        red, green, blue = (longest_run(image, color) for color in (RED, GREEN, BLUE))
    assert green / red == pytest.approx(1 / 2, abs=0.01)
    assert blue / red == pytest.approx(1 / 10, abs=0.01)


def test_the_first_bar_need_not_be_the_longest(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    draw_chart("title", "subtitle", [bar(1.0, RED), bar(2.0, GREEN)], [], path)
    with Image.open(path) as image:
        assert longest_run(image, RED) / longest_run(image, GREEN) == pytest.approx(1 / 2, abs=0.01)


def test_a_heading_has_a_row_of_its_own_and_changes_no_bar(tmp_path: Path) -> None:
    plain, grouped = tmp_path / "plain.png", tmp_path / "grouped.png"
    bars = [bar(5.0, RED), bar(2.5, GREEN)]
    draw_chart("title", "subtitle", bars, [], plain)
    draw_chart("title", "subtitle", [bars[0], replace(bars[1], heading="a second act")], [], grouped)
    with Image.open(plain) as without, Image.open(grouped) as image:
        assert image.height > without.height
        for color in (RED, GREEN):
            assert longest_run(image, color) == longest_run(without, color)
