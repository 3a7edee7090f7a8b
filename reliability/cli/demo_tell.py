"""The demo's result, for a person and as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outlast.reliability.cli.demo_run import TARGET, Outcome
from outlast.reliability.wording import percent


def tell(outcome: Outcome, say: Callable[[str], None]) -> None:
    """The last lines: the comparison, the samples, where the time went."""
    view, proof = outcome.view, outcome.comparison
    say("")
    say(f"{view.state}: {len(view.steps)} train_steps, {len(view.incidents)} incidents, {len(view.attempts)} attempts")
    say(
        f"against an undisturbed run: identical to step {proof.identical_until_step}; "
        f"max relative loss difference {proof.max_relative_loss_difference:.1e}"
        + (" (another layout sums in another order)" if proof.identical_until_step < TARGET else "")
    )
    say(
        f"samples: {proof.samples} of {TARGET * 8}, each once, in order"
        if proof.samples_once
        else f"samples: WRONG: {proof.samples_problem}"
    )
    ledger = view.ledger
    wall_s = max(ledger.wall_s, 1e-9)
    parts = "  ".join(f"{name} {percent(s / wall_s)}" for name, s in ledger.flat().items() if name != "wall_s")
    say(f"where the time went ({wall_s:.1f} s): {parts}")
    say("simulated: the XID line, the exception and the node's death; everything that followed was real")
    say(f"report: {outcome.report}")


def as_data(outcome: Outcome) -> Mapping[str, object]:
    view, proof = outcome.view, outcome.comparison
    return {
        "run": str(outcome.run_dir.root),
        "state": view.state,
        "exit_code": outcome.exit_code,
        "attempts": len(view.attempts),
        "incidents": [
            {
                "number": i.number,
                "verdict": i.verdict.kind,
                "node": i.verdict.node,
                "rank": i.verdict.rank,
                "rule": i.verdict.rule,
                "because": i.verdict.because,
                "actions": [a.text for a in i.acts],
            }
            for i in view.incidents
        ],
        "ledger": view.ledger.flat(),
        "reference": {
            "identical_until_step": proof.identical_until_step,
            "max_relative_loss_difference": proof.max_relative_loss_difference,
            "steps_compared": proof.steps_compared,
        },
        "samples_once": proof.samples_once,
        "report": str(outcome.report),
        "right": outcome.right,
    }
