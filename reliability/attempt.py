"""The life of one attempt, as a table. Pure; docs/attempt.svg is drawn from it.

An attempt is one launch of the run's ranks. It is planned, its nodes are gated, ranks start, load a checkpoint and
train; it always passes through STOPPING, which is over only when every node is proven empty or given up as lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class State(StrEnum):
    PLANNED = "planned"
    GATING = "gating"
    STARTING = "starting"
    LOADING = "loading"
    FIRST_STEP = "first_step"
    TRAINING = "training"
    STOPPING = "stopping"
    ENDED = "ended"


class Event(StrEnum):
    GATE_ASKED = "gate_asked"
    GATE_PASSED = "gate_passed"
    LOAD_BEGUN = "load_begun"
    TRAIN_BEGUN = "train_begun"
    STEP_DONE = "step_done"
    STOP_ASKED = "stop_asked"
    RANKS_FINISHED = "ranks_finished"
    NODES_CLEAR = "nodes_clear"


_RUNNING: Final = (State.STARTING, State.LOADING, State.FIRST_STEP, State.TRAINING)

TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (State.PLANNED, Event.GATE_ASKED): State.GATING,
    (State.GATING, Event.GATE_PASSED): State.STARTING,
    (State.STARTING, Event.LOAD_BEGUN): State.LOADING,
    (State.STARTING, Event.TRAIN_BEGUN): State.FIRST_STEP,
    (State.LOADING, Event.TRAIN_BEGUN): State.FIRST_STEP,
    # programs without phases show a finished step as their first sign of life
    (State.STARTING, Event.STEP_DONE): State.TRAINING,
    (State.LOADING, Event.STEP_DONE): State.TRAINING,
    (State.FIRST_STEP, Event.STEP_DONE): State.TRAINING,
    (State.TRAINING, Event.STEP_DONE): State.TRAINING,
    # the last steps of ranks that are already ending still count
    (State.STOPPING, Event.STEP_DONE): State.STOPPING,
    (State.PLANNED, Event.STOP_ASKED): State.STOPPING,
    (State.GATING, Event.STOP_ASKED): State.STOPPING,
    **{(state, Event.STOP_ASKED): State.STOPPING for state in _RUNNING},
    **{(state, Event.RANKS_FINISHED): State.STOPPING for state in _RUNNING},
    (State.STOPPING, Event.NODES_CLEAR): State.ENDED,
}


class AttemptError(ValueError):
    """An event that does not apply in this state."""

    def __init__(self, state: State, event: Event) -> None:
        self.state, self.event = state, event
        known = sorted(e.value for s, e in TRANSITIONS if s is state)
        super().__init__(f"attempt is {state}: {event} does not apply here (only {', '.join(known) or 'nothing'})")


def moved(state: State, event: Event) -> State:
    """The next state; AttemptError where the table has none."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise AttemptError(state, event) from None
