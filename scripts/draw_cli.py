"""Draws docs/cli.png: what `kvtier list` and `show` print, of a real daemon with a scripted engine.

.venv/bin/python -m scripts.draw_cli [FONT]

FONT is a monospaced TrueType font.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.core.layout import GroupLayout, KVLayout
from tests.fakes.operator import Stub, on_disk, pin
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

PATH = Path(__file__).parents[1] / "docs" / "cli.png"
FONT = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono.ttf"
COMMANDS = (["list"], ["show", "greeting"])
CHUNK_TOKENS, CHUNK_BYTES = 128, 1 << 20
LAYOUT = KVLayout(
    num_ranks=1,
    rank_bytes=CHUNK_BYTES,
    num_writers=1,
    groups=(GroupLayout(group_idx=0, chunk_tokens=CHUNK_TOKENS, useful_bytes=CHUNK_BYTES),),
)
MODEL = "my-model"
COLUMNS, SIZE, LINE, MARGIN = 80, 26, 36, 40
CARD, TEXT, PROMPT = "#111827", "#e5e7eb", "#34d399"


def main() -> None:
    """Draw."""
    font = ImageFont.truetype(sys.argv[1] if len(sys.argv) > 1 else FONT, SIZE)
    with tempfile.TemporaryDirectory() as folder:
        lines = asyncio.run(printed(config_in(Path(folder), host_bytes=64 * CHUNK_BYTES)))
    width = max(round(font.getlength("m" * len(line))) for line in lines)
    image = Image.new("RGB", (width + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN), CARD)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        color = PROMPT if line.startswith("$ ") else TEXT
        draw.text((MARGIN, MARGIN + number * LINE), line, font=font, fill=color)
    image.save(PATH, optimize=True)


async def printed(config: DaemonConfig) -> list[str]:
    """Return the commands and their lines."""
    lines: list[str] = []
    async with running(config) as stub, ScriptedEngine(config, LAYOUT, model_names=[MODEL], store_credits=32) as engine:
        await fill(stub, engine)
        for command in COMMANDS:
            arguments = [sys.executable, "-c", "from kvtier.cli.app import main; main()", *command]
            environment = os.environ | {"KVTIER_SOCKET": str(config.server.socket), "COLUMNS": str(COLUMNS)}
            done = await asyncio.to_thread(
                subprocess.run, arguments, env=environment, capture_output=True, text=True, check=True
            )
            lines += [f"$ kvtier {' '.join(command)}", *(line.rstrip() for line in done.stdout.splitlines()), ""]
    return lines[:-1]


async def fill(stub: Stub, engine: ScriptedEngine) -> None:
    """Pin one prompt under two names, one that is half stored, and one that is too short."""
    support, review = [chunk_key(number) for number in range(23)], [chunk_key(-number) for number in range(1, 17)]
    for name, tokens, keys in [("support", 3027, support), ("support-eu", 3027, support), ("review", 2089, review)]:
        pin_id = await pin(stub, name, tokens, model=MODEL, first=len(keys))
        bound = pb.BindPin(pin_id=pin_id, keys=keys, covered_tokens=len(keys) * CHUNK_TOKENS)
        await engine.send(bind_pin=bound)
    refused = await pin(stub, "greeting", 6, model=MODEL, recipe_json='{"kind": "system", "content": "Be polite."}')
    problem = "the prompt has 6 tokens, less than one chunk of 128; only whole chunks are kept, so pin a longer prompt"
    await engine.send(bind_pin=pb.BindPin(pin_id=refused, error=f"{problem} (tools count)"))
    await engine.store([*support, *review[:9]])
    await on_disk(stub, 23 + 9)
    await engine.barrier()


if __name__ == "__main__":
    main()
