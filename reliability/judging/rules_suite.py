"""Rules on the supervising software itself and on what a case says in words only. Pure.

A supervisor is a source of faults too: it acts on old state, twice, or after it lost its seat. Its own doing is judged
like everybody's. Words that nothing could be made of are told to a person and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from outlast.reliability.judging.facts_run import Blind, Harmless, Note, OwnDoing, Tried
from outlast.reliability.judging.scene import Scene, ids
from outlast.reliability.judging.sources import Src
from outlast.reliability.judging.words import Act, Finding, lost
from outlast.reliability.verdict import Kind

NO_PROGRESS_TRIES: Final = 3

_OWN: Final[Mapping[str, tuple[Kind, Act, str, str | None]]] = {
    "lease_lost": (
        Kind.SOFTWARE_FAULT,
        Act.FENCE,
        "the lease was lost: whoever woke late does nothing and ends",
        "lease",
    ),
    "stale_action": (
        Kind.SOFTWARE_FAULT,
        Act.NONE,
        "older than the node's last return to service: void",
        "state store",
    ),
    "cancelled_drain": (
        Kind.SOFTWARE_FAULT,
        Act.NONE,
        "cancelled is not done: nothing follows from it",
        "state machine",
    ),
    "repeated_action": (
        Kind.SOFTWARE_FAULT,
        Act.NONE,
        "its own action of before, known by its incident",
        "lost memory",
    ),
    "stuck_request": (Kind.SOFTWARE_FAULT, Act.PAGE, "no end by its deadline: a person is needed", "remediation"),
    "false_alarm": (Kind.NO_FAULT, Act.NONE, "a limit of another phase was used; none is passed in this one", None),
    "clock_step": (Kind.NO_FAULT, Act.NONE, "the clock was stepped: all nodes at once is never all nodes", None),
    "settling": (Kind.TRANSIENT, Act.NONE, "leftovers join for a moment: judge after they have settled", None),
}


def own_doings(scene: Scene) -> Iterator[Finding]:
    for seen in scene.seen(OwnDoing):
        if seen.what in _OWN:
            verdict, action, why, culprit = _OWN[seen.what]
            yield Finding(
                verdict=verdict,
                action=action,
                rule=f"own_{seen.what}",
                why=why,
                culprit=culprit,
                evidence=ids([seen]),
                rejected=(lost("act on it", "present evidence is looked at again before any act"),),
            )


def no_progress(scene: Scene) -> Iterator[Finding]:
    """Tries that all end where they began."""
    tries = scene.seen(Tried)
    # progress is a newer checkpoint, not a longer life
    still = len([t for t in tries if t.loaded == tries[-1].loaded]) if tries else 0
    if still >= NO_PROGRESS_TRIES:
        yield Finding(
            verdict=Kind.AMBIGUOUS,
            action=Act.STOP,
            rule="no_progress",
            why=f"{still} tries in a row got no further: stop, cancel what is queued, call a person",
            evidence=ids(tries),
            rejected=(lost("one more try", "it would end in the same place"),),
            checks={"cancel_chain": True, "max_no_progress": NO_PROGRESS_TRIES},
        )


def blind(scene: Scene) -> Iterator[Finding]:
    """A source was blind, and no other has anything to tell."""
    gaps = scene.seen(Blind)
    if gaps:
        yield Finding(
            verdict=Kind.MONITORING_FAULT,
            action=Act.PAGE,
            rule="blind",
            why="a source did not see a while: what it did not see is not known to be well",
            evidence=ids(gaps),
            rejected=(lost("healthy", "blind is not healthy"),),
            checks={"gap_reported": True},
        )


def words_only(scene: Scene) -> Iterator[Finding]:
    """Nothing of a machine's making could be read."""
    notes = scene.seen(Note)
    harmless = scene.seen(Harmless)
    told = [n for n in notes if n.kind is not Src.TEXT and n.text.strip()]
    text = [n for n in notes if n.kind is Src.TEXT and n.text.strip()]
    if not told and not text and (harmless or not any(type(f) is not Note for f in scene.facts)):
        yield Finding(
            verdict=Kind.NO_FAULT,
            action=Act.LOG if harmless else Act.NONE,
            rule="ordinary_lines" if harmless else "empty",
            why="ordinary lines, known to mean nothing" if harmless else "there is nothing to judge",
            evidence=ids(harmless),
        )
    else:
        yield Finding(
            verdict=Kind.AMBIGUOUS,
            action=Act.PAGE,
            rule="words_only",
            why="told in words, or in a form that no reader knows: words convict nobody, a person should read them",
            evidence=ids([*told, *text] or scene.facts),
            rejected=(lost("whom the words accuse", "no machine says so"),),
        )
