"""What is wrong with a run file: findings, and the one exception that carries all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.reliability.model import Noun


class Finding(Noun, frozen=True, kw_only=True):
    """One thing to mend: where, what was found, what was expected, what to do."""

    source: str
    """The file or the command line word that it stands in."""
    path: str = ""
    """`$.limits.drains_per_hour`; '' where the whole source is meant."""
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.path, self.text) if part)


class ConfigError(Exception):
    """A run file that cannot be used. Holds everything that was found, not the first thing alone."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))


def show(value: object) -> str:
    """A found value for a message: short, on one line, control characters visible."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"  # str() of a huge int is refused by Python itself
    text = f"'{printable(value)}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """The same with control characters and line breaks written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
