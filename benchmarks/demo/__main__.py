"""`make demo`: flood vLLM, restart vLLM, kill the daemon, and see from where a system prompt is restored.

In the first act the prompt is pinned by hand, in the second kvtier finds another one by itself. Everything is real:
kvtier-daemon, `vllm serve` with the connector, the `kvtier` CLI, the openai client. Prints a table and draws a chart.
The exit status is 1 if another tier than the expected one served a case, or if the second prompt was not found.
"""

import argparse
import platform
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
from rich.console import Console
from rich.markup import escape

from benchmarks.demo import found_prompt, named_prompt
from benchmarks.demo.result import CHART_PATH, draw, table
from benchmarks.demo.stage import DemoError, Stage
from benchmarks.demo.story import Story
from benchmarks.harness.model_specs import DEMO
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import StartError, interrupt_on_signals
from benchmarks.measuring.machine import fast_dtype, machine_line

OUTPUT_COLUMNS = 120
NUM_LOG_LINES = 15


def run_demo(model: str, dtype: str, console: Console) -> int:
    """Run everything in a temporary folder; return the exit status."""
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        stage = Stage(model, dtype, home, console)
        try:
            with stage.running():
                story = Story(acts=[named_prompt.play(stage), found_prompt.play(stage)], cold=stage.cold)
        except (DemoError, StartError, TimeoutError, httpx.HTTPError, openai.OpenAIError) as error:
            for log in sorted(home.glob("*.log")):
                console.print(f"[dim]--- the last lines of {log.name}[/dim]")
                lines = log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
                console.print(escape("\n".join(lines)), highlight=False)
            console.print(f"\n[bold red]The demo failed:[/bold red] {escape(str(error))}", highlight=False)
            return 1
        console.print(table(story))
        console.print(f"[dim]{machine_line()}; {escape(Path(model).name)}, {dtype}[/dim]", highlight=False)
        draw(story, Path(model).name, dtype)
        console.print(f"Chart: {CHART_PATH}", highlight=False)
        problems = story.failures()
        for problem in problems:
            console.print(f"[bold red]Not as expected:[/bold red] {escape(problem)}", highlight=False)
        return 1 if problems else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="model for vLLM; default: a small one with random weights")
    parser.add_argument("--dtype", default="", help="default: bfloat16 where the CPU is fast at it, else float32")
    arguments = parser.parse_args()
    interrupt_on_signals()
    console = Console()
    if not console.is_terminal:
        console = Console(width=OUTPUT_COLUMNS)
    dtype = arguments.dtype or fast_dtype()
    start_s = time.monotonic()
    try:
        if platform.system() != "Linux":
            console.print(f"kvtier runs on Linux; this is {platform.system()}")
            return 1
        model = arguments.model
        if not model:
            console.print("Making the demo's model (16 layers x 1024, random weights); it stays in .models.")
            model = str(cached_model("demo", DEMO))
        if dtype != "bfloat16":
            console.print(
                f"This CPU has no AVX-512, so bfloat16 is slow: the demo computes in {dtype}.", highlight=False
            )
        status = run_demo(model, dtype, console)
    except KeyboardInterrupt:
        console.print("Interrupted: everything that the demo started is stopped, and its files are removed.")
        return 130
    console.print(f"[dim]{time.monotonic() - start_s:.0f} s in all[/dim]", highlight=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
