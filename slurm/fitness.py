"""Is this Slurm fit for supervised runs? Settings and rights in, findings out; for `outlast doctor`.

`inspect` is pure. `inspect_site` asks Slurm and never raises: a site without Slurm is a finding too. Levels: ok;
warning, where a run works but something is slower or needs a person; bad, where it would not survive what it should.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from outlast.reliability.model import Noun
from outlast.slurm import commands, parsers
from outlast.slurm.client import SlurmClient, user_name
from outlast.slurm.errors import SlurmError

Settings = Mapping[str, str]


class Finding(Noun, frozen=True, kw_only=True):
    name: str
    level: str
    """ok | warning | bad"""
    found: str
    advice: str = ""
    """What it means and what to do; '' where all is well."""


class Rights(Noun, frozen=True, kw_only=True):
    """Of the user who would drain."""

    user: str
    admin_level: str = ""
    """As sacctmgr says it: None, Operator, Administrator; '' unknown (no accounting)."""
    slurm_user: str = ""
    """SlurmUser of slurm.conf, without the uid."""

    @property
    def may_drain(self) -> bool:
        return self.user in ("root", self.slurm_user) or self.admin_level.lower() in (
            "operator",
            "administrator",
            "admin",
        )


def inspect(settings: Settings, rights: Rights) -> tuple[Finding, ...]:
    """Findings over parsed `scontrol show config`, most basic first."""
    return (*(check(settings) for check in _CHECKS), _rights(rights))


def inspect_site(client: SlurmClient | None = None) -> tuple[Finding, ...]:
    """Ask Slurm, then judge; one 'bad' finding where there is no Slurm or it does not answer."""
    client = client or SlurmClient()
    try:
        settings = parsers.parse_config(client.run(commands.show_config_argv()))
    except SlurmError as error:
        advice = "install Slurm's client and run on a login node, or set SLURM_CONF; `outlast demo` needs no Slurm"
        if error.again:
            advice = (
                "Slurm is installed but slurmctld does not answer: `scontrol ping`; SLURM_CONF names another cluster?"
            )
        return (Finding(name="slurm", level="bad", found=" ".join(str(error).split())[:200], advice=advice),)
    return inspect(settings, ask_rights(client, settings))


def ask_rights(client: SlurmClient, settings: Settings) -> Rights:
    """What this user may do, as far as Slurm tells."""
    user = user_name()
    slurm_user = settings.get("SlurmUser", "").partition("(")[0]
    try:
        level = client.run(commands.rights_argv(user)).strip().splitlines()
    except SlurmError:
        level = []
    return Rights(user=user, slurm_user=slurm_user, admin_level=level[0].strip() if level else "")


def _version(settings: Settings) -> Finding:
    found = settings.get("SLURM_VERSION", "")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if not numbers:
        return Finding(
            name="Slurm version", level="warning", found=found or "not said", advice="expected as in 22.05.8"
        )
    if (int(numbers[1]), int(numbers[2])) < (22, 5):
        return Finding(
            name="Slurm version", level="warning", found=found, advice="older than 22.05, the oldest that was tried"
        )
    return Finding(name="Slurm version", level="ok", found=found)


def _preempt_mode(settings: Settings) -> Finding:
    found = settings.get("PreemptMode", "")
    modes = set(found.upper().split(","))
    advice = ""
    if "CANCEL" in modes:
        advice = "Slurm does not requeue a preempted run: go on with `outlast continue RUN`, or ask for REQUEUE here"
    elif modes & {"SUSPEND", "GANG"}:
        advice = "suspended ranks look hung: use a partition or QOS that is not preempted this way"
    return Finding(name="PreemptMode", level="warning" if advice else "ok", found=found or "not said", advice=advice)


def _job_requeue(settings: Settings) -> Finding:
    found = settings.get("JobRequeue", "")
    # the default of jobs that do not say; ours say --requeue
    return Finding(name="JobRequeue", level="ok", found=found or "not said")


def _kill_wait(settings: Settings) -> Finding:
    seconds = _seconds(settings, "KillWait")
    if seconds is not None and seconds < 10:
        advice = (
            "a run that Slurm ends has only this long between TERM and KILL to write its log; 30 is Slurm's default"
        )
        return Finding(name="KillWait", level="warning", found=f"{seconds} s", advice=advice)
    return Finding(name="KillWait", level="ok", found=_found(settings, "KillWait"))


def _unkillable(settings: Settings) -> Finding:
    unkillable, message = _seconds(settings, "UnkillableStepTimeout"), _seconds(settings, "MessageTimeout")
    found = f"{_found(settings, 'UnkillableStepTimeout')}, MessageTimeout {_found(settings, 'MessageTimeout')}"
    if unkillable is not None and message is not None and unkillable < 5 * message:
        advice = f"below 5 x MessageTimeout nodes are drained for slow kills: ask for at least {5 * message}"
        return Finding(name="UnkillableStepTimeout", level="warning", found=found, advice=advice)
    return Finding(name="UnkillableStepTimeout", level="ok", found=found)


def _cred_expire(settings: Settings) -> Finding:
    match = re.search(r"cred_expire=(\d+)", settings.get("AuthInfo", ""))
    seconds = int(match[1]) if match else 120
    found = f"{seconds} s{'' if match else ' (default)'}"
    if seconds <= 120:
        return Finding(name="cred_expire", level="ok", found=found)
    advice = f"a requeued run starts no sooner than {seconds + 1} s later; Slurm's default is 120"
    return Finding(name="cred_expire", level="warning", found=found, advice=advice)


def _kill_on_bad_exit(settings: Settings) -> Finding:
    # the default of steps that do not say; ours say 0
    return Finding(name="KillOnBadExit", level="ok", found=settings.get("KillOnBadExit", "") or "not said")


def _return_to_service(settings: Settings) -> Finding:
    found = settings.get("ReturnToService", "")
    advice = ""
    if found == "2":
        advice = "a node that was down for any reason comes back by itself: drain the ones that must not"
    return Finding(
        name="ReturnToService", level="warning" if advice else "ok", found=found or "not said", advice=advice
    )


def _slurmd_timeout(settings: Settings) -> Finding:
    seconds = _seconds(settings, "SlurmdTimeout")
    if seconds == 0:
        advice = "dead nodes are never marked DOWN, so jobs on them are never requeued: ask for 300, Slurm's default"
        return Finding(name="SlurmdTimeout", level="bad", found="0 (never)", advice=advice)
    return Finding(name="SlurmdTimeout", level="ok", found=_found(settings, "SlurmdTimeout"))


def _accounting(settings: Settings) -> Finding:
    found = settings.get("AccountingStorageType", "")
    if found.rpartition("/")[2] in ("none", ""):
        advice = (
            "without slurmdbd a job is forgotten MinJobAge seconds after its end, and who cancelled it is not known"
        )
        return Finding(name="accounting", level="warning", found=found or "none", advice=advice)
    return Finding(name="accounting", level="ok", found=found)


def _rights(rights: Rights) -> Finding:
    level = rights.admin_level or "not said"
    if rights.may_drain:
        why = "root or SlurmUser" if rights.user in ("root", rights.slurm_user) else level
        return Finding(name="drain rights", level="ok", found=f"yes ({rights.user}: {why})")
    return Finding(
        name="drain rights",
        level="warning",
        found=f"no ({rights.user}: {level})",
        advice="verdicts become exclusions inside the run and advice to the admin; an admin gives the right with"
        f" `sacctmgr modify user {rights.user} set adminlevel=Operator`",
    )


def _seconds(settings: Settings, key: str) -> int | None:
    """`30 sec` as 30; None where it is not a number."""
    word = settings.get(key, "").split(" ")[0]
    return int(word) if word.isascii() and word.isdigit() else None


def _found(settings: Settings, key: str) -> str:
    return settings.get(key, "") or "not said"


_CHECKS: tuple[Callable[[Settings], Finding], ...] = (
    _version,
    _accounting,
    _slurmd_timeout,
    _preempt_mode,
    _job_requeue,
    _kill_wait,
    _unkillable,
    _cred_expire,
    _kill_on_bad_exit,
    _return_to_service,
)
