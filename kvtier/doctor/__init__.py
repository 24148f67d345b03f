"""Checks of machine, folders, daemon, vLLM and pins, each with a remedy; they change nothing.

One module for each subject. A check is a function from values to findings, so that tests and `--check-config` of the
daemon can call it too.
"""

from kvtier.doctor.all_checks import check_environment, run_checks
from kvtier.doctor.report import CHECKS, CheckResult, Status

__all__ = ["CHECKS", "CheckResult", "Status", "check_environment", "run_checks"]
