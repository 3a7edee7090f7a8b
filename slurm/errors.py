"""The one exception of this folder: what was asked of Slurm, what came back, and whether asking again can help."""

from __future__ import annotations


class SlurmError(Exception):
    """Slurm refused, did not answer, or said something that we cannot read.

    `again` tells whether the same question may be answered later (a time-out, a controller that restarts); False means
    that it was understood and refused. `output` keeps what the command said, for logs.
    """

    def __init__(self, what: str, *, again: bool, output: str = "") -> None:
        super().__init__(what)
        self.again = again
        self.output = output


class TestbedError(SlurmError):
    """The testbed cannot do what was asked; the message says what to do next."""

    __test__ = False  # pytest takes classes named Test* for tests

    def __init__(self, what: str) -> None:
        super().__init__(what, again=False)
