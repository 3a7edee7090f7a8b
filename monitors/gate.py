"""The node gate, `outlast check`: is this node fit for an attempt? Standard library only, and quick.

It runs as an administrator's command, as Slurm's HealthCheckProgram or Prolog (`--hook`), and before every attempt.
Silent when well. It names what it found and what it expected; it drains nothing and repairs nothing.

    exit 0 well    1 a proven fault    75 unknown (a check that timed out has not failed)    2 wrong use

As a hook only a proven fault exits non-zero: unknown, an error of our own and a bad configuration exit 0 with a line
to syslog, since a typo must not drain a cluster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from outlast.monitors import gate_checks, gate_child
from outlast.monitors.gate_checks import FAULT, UNKNOWN, WELL, Finding

EXIT = {WELL: 0, FAULT: 1, UNKNOWN: 75}
EXIT_USAGE = 2
WRITABLE, MOUNTED, GPU = "writable", "mounted", "gpu"
CHECKS = ("writable", "mounted", "shm", "clock", "leftovers", "port", "ib", "gpu")

USAGE = """usage: outlast check [options]

Test this node. Silent when it is well; exit 0 well, 1 a proven fault, 75 unknown, 2 wrong use.

  --path DIR          must be writable (repeat)            --mount DIR     must be a mount point (repeat)
  --shm-bytes N       free space in /dev/shm               --marker TEXT   no process may carry it (repeat)
  --gpus N            this many GPUs, all well             --gpu-used N    bytes that may be in use on a GPU
  --ib PORT           mlx5_0:1 or all, must be up (repeat) --clock-skew S  against the file server of --path
  --port ADDRESS      find a free port there               --deadline S    for all checks together (default 5)
  --skip CHECK        leave out: writable mounted shm clock leftovers port ib gpu, or a GPU's ecc remap retired
                      recovery pcie throttle memory nvlink (repeat)
  --config FILE       TOML with the same names (path = [...], gpus = 8 ...); options win
  --node NODE         run it there instead, through srun
  --hook              as Prolog or HealthCheckProgram: only a proven fault exits non-zero, the rest goes to syslog
  --json              print the report as JSON
"""


class GateConfig(NamedTuple):
    """What to look at. Empty and -1 mean: do not."""

    path: tuple[str, ...] = ()
    mount: tuple[str, ...] = ()
    shm_bytes: int = 16 << 20
    marker: tuple[str, ...] = ()
    allow_pids: tuple[int, ...] = ()
    """Processes that may carry a marker (this run's own)."""
    gpus: int = -1
    gpu_used: int = 2 << 30
    """Bytes in use on an idle GPU: the driver's own share."""
    ib: tuple[str, ...] = ()
    clock_skew: float = 30.0
    port: str = ""
    deadline: float = 5.0
    skip: tuple[str, ...] = ()


class GateReport(NamedTuple):
    """The gate's answer."""

    outcome: str
    """well | fault | unknown"""
    findings: tuple[Finding, ...]
    """All of them, the well ones too."""
    free_port: int = 0

    @property
    def bad(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.outcome != WELL)


class UsageError(Exception):
    """A wrong option or configuration."""


def run_gate(config: GateConfig) -> GateReport:
    """Look at everything that is configured, within config.deadline seconds. Blocks; never raises for a bad node."""
    until_s = time.monotonic() + config.deadline
    on = [c for c in CHECKS if c not in config.skip]
    findings = _local_checks(config, on)  # first: its look at processes must not meet our own children
    children = _start_children(config, on)
    for kind, path, child in children:
        answer, why = gate_child.collect(child, until_s)
        findings += _judge(kind, path, answer, why, config)
    port = 0
    if config.port and "port" in on:
        port, failed = gate_checks.free_port(config.port)
        findings += failed
    outcomes = {f.outcome for f in findings}
    return GateReport(FAULT if FAULT in outcomes else UNKNOWN if UNKNOWN in outcomes else WELL, tuple(findings), port)


def _start_children(config: GateConfig, on: list[str]) -> list[tuple[str, str, gate_child.Child]]:
    """What may hang, all at once: (kind, path, child)."""
    work: list[tuple[str, str, Callable[[], str]]] = []
    if WRITABLE in on:
        work += [(WRITABLE, p, partial(gate_checks.write_probe, p)) for p in config.path]
    if MOUNTED in on:
        work += [(MOUNTED, p, partial(gate_checks.mount_probe, p)) for p in config.mount]
    if GPU in on and config.gpus >= 0:
        work.append((GPU, "", _read_gpus))
    return [(kind, path, gate_child.start(f"{kind} {path}", do)) for kind, path, do in work]


def _local_checks(config: GateConfig, on: list[str]) -> list[Finding]:
    """What cannot hang."""
    findings: list[Finding] = []
    if "shm" in on and config.shm_bytes > 0:
        findings += gate_checks.check_shm(config.shm_bytes)
    if "clock" in on:
        findings += gate_checks.check_clock()
    if "leftovers" in on:
        findings += gate_checks.check_leftovers(config.marker, config.allow_pids)
    if "ib" in on and config.ib:
        findings += gate_checks.check_ib(config.ib)
    return findings


def _read_gpus() -> str:
    from outlast.monitors.gate_nvml import read

    return read()


def _judge(kind: str, path: str, answer: str, why: str, config: GateConfig) -> list[Finding]:
    if kind == WRITABLE:
        return gate_checks.judge_write(path, answer, why, config.clock_skew)
    if kind == MOUNTED:
        return gate_checks.judge_mount(path, answer, why)
    if why:
        return [Finding("gpu", UNKNOWN, f"NVML: {why}")]
    if answer == "none":
        return [Finding("gpu", UNKNOWN if config.gpus > 0 else WELL, "no NVML to ask", f"{config.gpus} GPUs")]
    import json

    return gate_checks.judge_gpus(json.loads(answer), config.gpus, config.gpu_used, config.skip)


# ---------------------------------------------------------------- the command

_LISTS = {"--path": "path", "--mount": "mount", "--marker": "marker", "--ib": "ib", "--skip": "skip"}
_VALUES: dict[str, tuple[str, type]] = {
    "--shm-bytes": ("shm_bytes", int),
    "--gpus": ("gpus", int),
    "--gpu-used": ("gpu_used", int),
    "--clock-skew": ("clock_skew", float),
    "--deadline": ("deadline", float),
    "--port": ("port", str),
}


class Asked(NamedTuple):
    """The command line, read."""

    config: GateConfig
    node: str
    json: bool
    help: bool
    rest: tuple[str, ...]
    """The words without --node, for the other node."""


def read_words(words: list[str]) -> Asked:
    """Options over a configuration file. By hand: argparse alone would take a third of the time that the gate has."""
    given: dict[str, Any] = {}
    base = GateConfig()
    node, as_json, wants_help = "", False, False
    rest: list[str] = []
    at = 0
    while at < len(words):
        word, equals, value = words[at].partition("=")
        at += 1
        if word in ("--json", "--hook", "--help", "-h"):
            as_json, wants_help = as_json or word == "--json", wants_help or word in ("--help", "-h")
            rest.append(word)
            continue
        if word not in _LISTS and word not in _VALUES and word not in ("--config", "--node"):
            raise UsageError(f"{word}: no such option")
        if not equals:
            if at >= len(words):
                raise UsageError(f"{word}: expected a value")
            value = words[at]
            at += 1
        if word == "--node":
            node = value
            continue
        rest += [word, value]
        if word == "--config":
            base = read_config(value)
        elif word in _LISTS:
            given.setdefault(_LISTS[word], []).append(value)
        else:
            name, kind = _VALUES[word]
            given[name] = _value(word, value, kind)
    return Asked(_over(base, given), node, as_json, wants_help, tuple(rest))


def _over(base: GateConfig, given: dict[str, Any]) -> GateConfig:
    fields: dict[str, Any] = {**base._asdict(), **{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}}
    return GateConfig(**fields)


def _value(where: str, text: object, kind: type) -> Any:
    try:
        return kind(text)
    except (TypeError, ValueError):
        raise UsageError(f"{where}: expected {kind.__name__}, got {text!r}") from None


def read_config(path: str) -> GateConfig:
    """A site's TOML: the fields of GateConfig by name."""
    import tomllib

    try:
        with open(path, "rb") as f:
            data = tomllib.load(f)
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from None
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{path}: {e}") from None
    fields: dict[str, Any] = {}
    for name, value in data.items():
        default = getattr(GateConfig(), name, None) if name in GateConfig._fields else None
        if default is None:
            raise UsageError(f"{path}: {name}: no such setting (there are {', '.join(GateConfig._fields)})")
        if isinstance(default, tuple):
            if not isinstance(value, list):
                raise UsageError(f"{path}: {name}: expected a list, got {value!r}")
            fields[name] = tuple(value)
        else:
            fields[name] = _value(f"{path}: {name}", value, type(default))
    return GateConfig(**fields)


def main(argv: list[str]) -> int:
    """`outlast check`. Returns the exit code."""
    hook = "--hook" in argv
    try:
        asked = read_words(argv)
        if asked.help:
            sys.stdout.write(USAGE)
            return 0
        report = _elsewhere(asked) if asked.node else run_gate(asked.config)
    except UsageError as e:
        if hook:
            return _to_syslog(f"not run: {e}")
        sys.stderr.write(f"outlast check: {e}\n(outlast check --help)\n")
        return EXIT_USAGE
    except Exception as e:  # noqa: BLE001 - an error of our own must not drain the node
        if hook:
            return _to_syslog(f"failed itself: {type(e).__name__}: {e}")
        sys.stderr.write(f"outlast check: failed itself: {type(e).__name__}: {e}\n")
        return EXIT[UNKNOWN]
    _print(report, asked.json)
    if hook and report.outcome != FAULT:
        if report.outcome == UNKNOWN:
            _to_syslog("; ".join(map(str, report.bad)))
        return 0
    return EXIT[report.outcome]


def _print(report: GateReport, as_json: bool) -> None:
    if as_json:
        import json

        body = {
            "outcome": report.outcome,
            "free_port": report.free_port,
            "findings": [str(f) for f in report.bad],
            "checks": [f._asdict() for f in report.findings],
        }
        sys.stdout.write(json.dumps(body) + "\n")
        return
    for finding in report.bad:
        sys.stdout.write(f"{finding}\n")


def _to_syslog(text: str) -> int:
    import syslog

    syslog.openlog("outlast-check")
    syslog.syslog(syslog.LOG_WARNING, text[:1000])
    return 0


def _elsewhere(asked: Asked) -> GateReport:
    """The report of another node; unknown where it gives none."""
    from outlast.monitors.gate_elsewhere import ask

    far = ask(asked.node, asked.rest, asked.config.deadline)
    if far.report is None:
        return GateReport(UNKNOWN, (Finding(f"node {asked.node}", UNKNOWN, far.why),))
    rows = far.report.get("checks")
    findings = [
        Finding(*(str(row.get(field, ""))[:1000] for field in Finding._fields))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]
    port = far.report.get("free_port")
    return GateReport(str(far.report["outcome"]), tuple(findings), port if isinstance(port, int) else 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
