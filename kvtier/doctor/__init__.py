"""What is wrong, and what to do about it: checks of machine, folders, daemon, vLLM and pins that change nothing.

One module per family. A check is a function that returns findings; it takes what it judges as values, so that tests and
the daemon's `--check-config` use the same ones.
"""

from kvtier.doctor.all_checks import Patient, check_environment, examine
from kvtier.doctor.report import CHECKS, Finding, Status

__all__ = ["CHECKS", "Finding", "Patient", "Status", "check_environment", "examine"]
