"""The command line's front door. It decides one thing: whether the heavy part is needed at all.

`outlast check` runs on every node every few minutes, as a Slurm hook: it gets the standard library alone and must
start in less than 60 ms. So nothing is imported here before that word has been looked at.
"""

from __future__ import annotations

import sys


def main() -> None:
    """`outlast`. Ends the process with a documented exit code."""
    if sys.argv[1:2] == ["check"]:
        from outlast.monitors.gate import main as check

        raise SystemExit(check(sys.argv[2:]))
    from outlast.reliability.cli.root import start

    raise SystemExit(start(sys.argv[1:]))


if __name__ == "__main__":
    main()
