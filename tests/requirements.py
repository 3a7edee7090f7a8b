"""Prints what the tests need, from setup.cfg, one requirement a word: pip's argument list for `make`."""

import configparser
import sys
from pathlib import Path

options = configparser.ConfigParser()
options.read(Path(__file__).parent.parent / "setup.cfg")
extras = options["options.extras_require"]
wanted = (
    options["options"]["install_requires"]
    + extras["megatron"]
    + extras["megatron_lm"]
    + extras["gpu"]
    + extras["remote"]
    + extras["test"]
)
lines = [line for line in wanted.splitlines() if line.strip() and not line.strip().startswith("#")]
sys.stdout.write(" ".join("".join(line.split()) for line in lines))
