"""Horizontal bars as a PNG: one time per situation, on a scale that begins at zero.

Pillow draws them: vLLM needs it anyway, and its built-in font makes every machine's picture the same. The card has a
background of its own, so that it reads on light and on dark pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_SCALE = 2
_WIDTH = 960
_MARGIN = 36
_TOP = 112
_ROW_HEIGHT = 62
_HEADING_HEIGHT = 46
_BAR_HEIGHT = 30
_LABEL_WIDTH = 290
_VALUE_WIDTH = 150
_FOOTER_HEIGHT = 72
_FOOTER_LINE = 18
_MIN_BAR = 4
SHORT_S = 0.1
"""Below it milliseconds are written."""

_CARD, _TEXT, _MUTED, _TRACK = "#111827", "#f3f4f6", "#a3adbd", "#1f2937"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One situation.

    Attributes:
        label: What happened.
        note: A second, quieter line under it.
        value_s: Its time in seconds.
        color: As CSS writes it.
        heading: Of the bars that begin with this one; empty when it belongs to those above it.
    """

    label: str
    note: str
    value_s: float
    color: str
    heading: str = ""

    @property
    def height(self) -> int:
        """Height of its row, with a heading above it."""
        return _ROW_HEIGHT + (_HEADING_HEIGHT if self.heading else 0)


def draw_chart(title: str, subtitle: str, bars: Sequence[Bar], footer: Sequence[str], path: Path) -> None:
    """Draw the bars from top to bottom, each with its time and its share of the first, and write the file."""
    height = _TOP + sum(bar.height for bar in bars) + _FOOTER_HEIGHT
    image = Image.new("RGBA", (_WIDTH * _SCALE, height * _SCALE), (0, 0, 0, 0))
    canvas = _Canvas(ImageDraw.Draw(image))
    canvas.box(0, 0, _WIDTH, height, _CARD, radius=18)
    canvas.text(_MARGIN, 44, title, 25, _TEXT)
    canvas.text(_MARGIN, 78, subtitle, 15, _MUTED)
    longest_s = max(bar.value_s for bar in bars)
    bottom = _TOP
    for bar in bars:
        if bar.heading:
            canvas.text(_MARGIN, bottom + _HEADING_HEIGHT - 16, bar.heading, 18, _TEXT)
        bottom += bar.height
        canvas.bar(bottom - _ROW_HEIGHT, bar, longest_s, bars[0].value_s)
    for index, line in enumerate(reversed(footer)):
        canvas.text(_MARGIN, height - 28 - index * _FOOTER_LINE, line, 12, _MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


class _Canvas:
    """Draws in logical pixels; the image has `_SCALE` times as many, for screens that do."""

    def __init__(self, draw: ImageDraw.ImageDraw) -> None:
        self._draw = draw

    def bar(self, top: float, bar: Bar, longest_s: float, first_s: float) -> None:
        """Draw a row: label and note, the bar on its track, and what it measures behind the bar's end."""
        middle = top + _ROW_HEIGHT / 2
        left, width = _MARGIN + _LABEL_WIDTH, _WIDTH - 2 * _MARGIN - _LABEL_WIDTH - _VALUE_WIDTH
        length = max(_MIN_BAR, width * bar.value_s / longest_s)
        self.text(_MARGIN, middle - 9, bar.label, 16, _TEXT)
        self.text(_MARGIN, middle + 11, bar.note, 13, bar.color)
        half = _BAR_HEIGHT / 2
        self.box(left, middle - half, left + width, middle + half, _TRACK, radius=6)
        self.box(left, middle - half, left + length, middle + half, bar.color, radius=min(6, length / 2))
        value = _duration(bar.value_s)
        self.text(left + length + 12, middle, value, 17, _TEXT)
        self.text(left + length + 12 + self._width(value, 17) + 10, middle, f"{bar.value_s / first_s:.0%}", 15, _MUTED)

    def box(self, left: float, top: float, right: float, bottom: float, color: str, *, radius: float) -> None:
        """Fill a rounded rectangle."""
        corners = [each * _SCALE for each in (left, top, right, bottom)]
        self._draw.rounded_rectangle(corners, radius=radius * _SCALE, fill=color)

    def text(self, left: float, middle: float, text: str, size: int, color: str) -> None:
        """Write a line, centred on a height."""
        self._draw.text((left * _SCALE, middle * _SCALE), text, font=_font(size), fill=color, anchor="lm")

    def _width(self, text: str, size: int) -> float:
        return self._draw.textlength(text, font=_font(size)) / _SCALE


def _duration(seconds: float) -> str:
    if seconds >= SHORT_S:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= SHORT_S / 10 else f"{1000 * seconds:.1f} ms"


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * _SCALE)
