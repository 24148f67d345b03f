"""The Python environment of vLLM: is vLLM installed, does the connector support its version, and does it load?"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.doctor import engine_probe
from kvtier.doctor.report import CheckResult, fail, ok, skipped
from kvtier.printable import cut
from kvtier.vllm_versions import supports

PROBE_TIMEOUT_S = 120.0
_NAME_IT = "name the interpreter that vLLM runs with: --python"


@dataclass(frozen=True, kw_only=True)
class EngineEnvironment:
    """Result of the probe.

    Attributes:
        vllm: Installed version; empty: none.
        series: First and last minor version of vLLM that its kvtier supports; empty: kvtier is not installed.
        hashes: Block hashes of vLLM that are the same after a restart.
        problem: Why the connector does not load; empty: it loads, or vLLM is missing and it was not tried.
        remedy: What to do about it; empty: kvtier has to be installed there.
    """

    vllm: str = ""
    series: Sequence[str] = ()
    hashes: Sequence[str] = ()
    problem: str = ""
    remedy: str = ""


def probe_environment(python: Path) -> EngineEnvironment:
    """Probe an environment with its interpreter. Takes as long as the import of vLLM: seconds."""
    source = Path(engine_probe.__file__).read_text(encoding="utf-8")
    if len(python.parts) > 1:  # a name alone is looked for in $PATH
        python = python.absolute()
    try:
        # In /, because -c puts the working directory first on the path.
        done = subprocess.run(
            [python, "-c", source],
            cwd="/",
            capture_output=True,
            text=True,
            errors="replace",  # what is imported there may print anything
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = "run this again while the machine has less to do"
        return EngineEnvironment(problem=f"the import took more than {PROBE_TIMEOUT_S:g} s", remedy=remedy)
    except OSError as exc:
        return EngineEnvironment(problem=f"{python} cannot be run: {exc.strerror}", remedy=_NAME_IT)
    try:
        found = EngineEnvironment(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        # The last line of a traceback says what happened.
        said = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        found = EngineEnvironment(problem=said[-1])
    return replace(found, problem=cut(str(found.problem)))


def check_environment_of_vllm(environment: EngineEnvironment, python: Path | None) -> list[CheckResult]:
    """Judge an environment; without a named interpreter, that of this CLI was probed."""
    where, version = str(python or sys.executable), environment.vllm
    if version:
        installed = check_version("vllm.installed", version, environment.series, f"{version} in {where}")
    elif python is not None:
        installed = fail("vllm.installed", f"not for {where}", _NAME_IT)
    else:
        installed = skipped("vllm.installed", f"not for {where}; {_NAME_IT}")
    if environment.problem:
        how = environment.remedy or f"install kvtier there: {where} -m pip install . in a checkout of kvtier"
        return [installed, fail("vllm.connector", environment.problem, how)]
    if not version:
        return [installed, skipped("vllm.connector", "without vLLM it cannot be loaded")]
    return [installed, ok("vllm.connector", f"loads, for vLLM {' to '.join(environment.series)}")]


def check_version(check: str, version: str, series: Sequence[str], found: str) -> CheckResult:
    """Judge a version of vLLM by the range that its kvtier supports; without a range every version is good."""
    if series and not supports(version, series):
        wanted = " to ".join(series)
        remedy = f"install vLLM {wanted}, or a kvtier for that vLLM"
        return fail(check, f"{found}; the connector is written for {wanted}", remedy)
    return ok(check, found)
