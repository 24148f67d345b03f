"""Checks of machine, folders, daemon, vLLM and pins, each with a remedy; they change nothing."""

from kvtier.doctor.all_checks import check_environment, run_checks
from kvtier.doctor.report import CHECKS, CheckResult, Status

__all__ = ["CHECKS", "CheckResult", "Status", "check_environment", "run_checks"]
