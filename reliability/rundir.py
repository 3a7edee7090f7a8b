"""Where things lie in a run directory. Pure path arithmetic; the one place that knows the names."""

from __future__ import annotations

from pathlib import Path

from outlast.reliability.model import Noun, Rank


class RunDir(Noun, frozen=True, kw_only=True):
    """`RUN_ROOT/<run>/`: the whole truth about a run, on a file system that all nodes see, mode 0700."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def run_file(self) -> Path:
        """The frozen RunFile as JSON-compatible YAML."""
        return self.root / "run.yaml"

    @property
    def identity(self) -> Path:
        return self.root / "identity.json"

    @property
    def policy(self) -> Path:
        """The site's own rows of the catalogue as they were when the run was frozen; none where there were none."""
        return self.root / "policy.yaml"

    @property
    def secret(self) -> Path:
        """Per-run secret of the agent link, 32 random bytes in hex, mode 0600."""
        return self.root / "secret"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def epochs(self) -> Path:
        """`epochs/<n>`: who supervises; JSON of wire.Seat, made by link(2), the highest number counts."""
        return self.root / "epochs"

    @property
    def orphans(self) -> Path:
        """Agents without a supervisor show themselves to each other here, `orphans/<epoch>/<node>`."""
        return self.root / "orphans"

    @property
    def requests(self) -> Path:
        """A person's wishes: one JSON file of OperatorAsked each, renamed into place, removed when in the log."""
        return self.root / "requests"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def attempt(self, attempt: int) -> Path:
        return self.root / "attempts" / f"{attempt:04d}"

    def plan(self, attempt: int) -> Path:
        return self.attempt(attempt) / "plan.json"

    def save_every(self, attempt: int) -> Path:
        """Train_steps between saves as the supervisor asks for them while the attempt trains; mostly not there."""
        return self.attempt(attempt) / "save_every"

    def rank(self, attempt: int, rank: Rank) -> Path:
        """Directory of one rank: `log`, `log.1` ..., `stack.txt`."""
        return self.attempt(attempt) / "ranks" / f"{rank:05d}"
