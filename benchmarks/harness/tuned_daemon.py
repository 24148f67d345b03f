"""kvtier-daemon with other values for configuration fields that users cannot set; tests and benchmarks vary them.

    TUNED_DISK_PACK_LINGER_S=0.01 python -m benchmarks.harness.tuned_daemon [options of kvtier-daemon]

A variable is TUNED_<SECTION>_<FIELD> of `kvtier.config.DaemonConfig`, or TUNED_LIMITS_<NAME> of `kvtier.core.limits`;
its value is JSON.
"""

import json
import os
from dataclasses import replace

from kvtier.config import DaemonConfig
from kvtier.core import limits
from kvtier.daemon import lifecycle
from kvtier.daemon import main as daemon

_PREFIX = "TUNED_"
_run = lifecycle.run


def tuned(config: DaemonConfig) -> DaemonConfig:
    """Return the configuration with the fields that the environment names."""
    for variable, text in os.environ.items():
        if variable.startswith(_PREFIX):
            section, _, field = variable.removeprefix(_PREFIX).lower().partition("_")
            if section == "limits":
                setattr(limits, field.upper(), json.loads(text))
                continue
            changed = replace(getattr(config, section), **{field: json.loads(text)})
            config = replace(config, **{section: changed})
    return config


def main() -> None:
    """Run the daemon's own entry point."""
    lifecycle.run = lambda config: _run(tuned(config))
    daemon.main()


if __name__ == "__main__":
    main()
