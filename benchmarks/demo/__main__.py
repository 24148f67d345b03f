"""`make demo`: a pinned system prompt through flood, restart of vLLM and kill -9 of the daemon, as a table and a chart.

Everything is real: kvtier-daemon, `vllm serve` with the connector, the `kvtier` CLI, the openai client. The exit status
is 1 when a case was not served from where it should have been.
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

from benchmarks.demo.story import CHART_PATH, Demo, DemoError
from benchmarks.harness.model_specs import DEMO
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import StartError, interrupt_on_signals
from benchmarks.measuring.machine import fast_dtype, machine_line

OUTPUT_COLUMNS = 120


def run_demo(model: str, dtype: str, console: Console) -> int:
    """Run everything in a folder that is gone afterwards; return the exit status."""
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        demo = Demo(model, dtype, home, console)
        try:
            demo.run()
        except (DemoError, StartError, TimeoutError, httpx.HTTPError, openai.OpenAIError) as error:
            console.print(f"[bold red]demo failed:[/bold red] {escape(str(error))}", highlight=False)
            for log in sorted(home.glob("*.log")):
                console.print(f"[dim]--- the end of {log.name}[/dim]")
                console.print(escape("\n".join(log.read_text(errors="replace").splitlines()[-15:])), highlight=False)
            return 1
        console.print(demo.table())
        console.print(f"[dim]{machine_line()}; {escape(Path(model).name)}, {dtype}[/dim]", highlight=False)
        demo.draw(Path(model).name, dtype)
        console.print(f"chart: {CHART_PATH}", highlight=False)
        problems = demo.failures()
        for problem in problems:
            console.print(f"[bold red]not as promised:[/bold red] {problem}", highlight=False)
        return 1 if problems else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--model", default="", help="model for vLLM; default: a small one, made here")
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
            raise DemoError("kvtier runs on Linux")
        model = arguments.model
        if not model:
            console.print("making the demo model (16 layers x 1024, random weights) ...")
            model = str(cached_model("demo", DEMO))
        if dtype != "bfloat16":
            console.print(
                f"this CPU has no AVX-512, where bfloat16 is slow: the demo computes in {dtype}", highlight=False
            )
        status = run_demo(model, dtype, console)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started is stopped and removed")
        return 130
    console.print(f"[dim]{time.monotonic() - start_s:.0f} s in all[/dim]", highlight=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
