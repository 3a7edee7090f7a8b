"""`python -m tests.bench [NAME ...]`: run the named benches, or the usual ones, and print their rows.

Each bench is a module here with `measure(out, rounds, say) -> rows` that writes build/bench/<name>.json. Exit code 1
where a measured target was missed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from tests.bench.rows import Row, render

BENCHES = ("restart", "evidence", "checkpoint")
USUAL = ("restart", "evidence")
"""Without a name; the checkpoint bench takes long and has a target of its own in the Makefile."""
OUT = Path("build/bench")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Ours beside the peers', in one run.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHES)} [default: restart evidence]"
    )
    parser.add_argument("--rounds", type=int, default=5, help="times that each is measured; the median counts")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(BENCHES))
    if unknown or asked.rounds < 1:
        parser.error(f"no bench {unknown[0]!r}; there are {', '.join(BENCHES)}" if unknown else "--rounds: at least 1")
    rows: list[Row] = []
    for name in asked.names or USUAL:
        rows += importlib.import_module(f"tests.bench.{name}").measure(OUT.absolute(), asked.rounds, _say)
    _say("\n" + render(rows))
    return 1 if any(row.missed for row in rows) else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
