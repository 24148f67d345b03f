"""Small line charts side by side as a PNG, with a scale from 0 to 100 % and equal distances between x values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_SCALE = 2
_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT = 2, 480, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 44, 44
_HEADER, _LEGEND_STEP = 100, 108
_CARD, _TEXT, _MUTED, _GRID = "#111827", "#f3f4f6", "#a3adbd", "#374151"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart: for each line as many shares (0 to 1) as there are names on the x axis."""

    title: str
    x_names: Sequence[str]
    lines: Mapping[str, Sequence[float]]


def draw_panels(title: str, panels: Sequence[Panel], colors: Mapping[str, str], path: Path) -> None:
    """Draw the panels row by row under a legend of `colors`, the first one on top of the others."""
    num_rows = -(-len(panels) // _COLUMNS)
    size = _COLUMNS * _PANEL_WIDTH * _SCALE, (_HEADER + num_rows * _PANEL_HEIGHT) * _SCALE
    image = Image.new("RGB", size, _CARD)
    canvas = ImageDraw.Draw(image)
    _text(canvas, 24, 32, title, 20, _TEXT)
    for number, (name, color) in enumerate(colors.items()):
        left = 24 + number * _LEGEND_STEP
        _line(canvas, [(left, 70), (left + 18, 70)], color)
        _text(canvas, left + 24, 70, name, 12, _MUTED)
    for number, panel in enumerate(panels):
        row, column = divmod(number, _COLUMNS)
        _draw_panel(canvas, panel, colors, column * _PANEL_WIDTH, _HEADER + row * _PANEL_HEIGHT)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def _draw_panel(
    canvas: ImageDraw.ImageDraw, panel: Panel, colors: Mapping[str, str], panel_left: int, panel_top: int
) -> None:
    left, right = panel_left + _LEFT, panel_left + _PANEL_WIDTH - _RIGHT
    top, bottom = panel_top + _TOP, panel_top + _PANEL_HEIGHT - _BOTTOM
    _text(canvas, left, panel_top + 22, panel.title, 15, _TEXT)
    for percent in (0, 25, 50, 75, 100):
        y = bottom - (bottom - top) * percent / 100
        _line(canvas, [(left, y), (right, y)], _GRID, width=1)
        _text(canvas, left - 8, y, f"{percent} %", 11, _MUTED, anchor="rm")
    places = [left + (right - left) * (number + 0.5) / len(panel.x_names) for number in range(len(panel.x_names))]
    for x, name in zip(places, panel.x_names, strict=True):
        _text(canvas, x, bottom + 16, name, 11, _MUTED, anchor="mm")
    for name in reversed(list(colors)):
        heights = [bottom - (bottom - top) * share for share in panel.lines[name]]
        _line(canvas, list(zip(places, heights, strict=True)), colors[name])


def _line(canvas: ImageDraw.ImageDraw, points: Sequence[tuple[float, float]], color: str, width: int = 2) -> None:
    canvas.line([(x * _SCALE, y * _SCALE) for x, y in points], fill=color, width=width * _SCALE, joint="curve")


def _text(
    canvas: ImageDraw.ImageDraw, x: float, y: float, text: str, size: int, color: str, anchor: str = "lm"
) -> None:
    font = ImageFont.load_default(size * _SCALE)
    canvas.text((x * _SCALE, y * _SCALE), text, font=font, fill=color, anchor=anchor)
