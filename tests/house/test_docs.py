"""What the pages say is true: commands parse, links lead somewhere, settings and files exist, run files pass."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from outlast.monitors.gate import read_words
from outlast.reliability.cli import root
from outlast.reliability.config_shape import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND_LINE = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?outlast( .*)?$")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- commands


def _commands(page: Path) -> Iterator[list[str]]:
    """The words of each `outlast ...` of a page, in blocks of the shell and between backquotes."""
    for kind, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if kind in ("console", "sh", "bash"):
            yield from (_words(line) for line in block.splitlines() if COMMAND_LINE.match(line))
    for line in INLINE.findall(_prose(page)):
        if COMMAND_LINE.match(line):
            words = _words(line)
            # prose may name a command without its arguments
            yield words if any(word in words for word in ("RUN", "RUN.yaml")) or len(words) > 2 else [*words, "--help"]


def _words(line: str) -> list[str]:
    return shlex.split(line.strip().removeprefix("$ "), comments=True)[1:]


def _check_command(words: list[str]) -> str:
    """'' where click would take these words, else its complaint. Nothing is run."""
    if words[:1] == ["check"]:
        read_words([word for word in words[1:] if word not in ("-h", "--help")])
        return ""
    command: click.Command = root.cli
    context = click.Context(command, info_name="outlast")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        if found is None:
            return f"no such command: {words[0]}"
        command, words = found, words[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.make_context("outlast", words)
    except click.exceptions.Exit as done:
        return "" if done.exit_code == 0 else f"exit code {done.exit_code}"
    except click.exceptions.NoArgsIsHelpError:
        return ""
    except click.ClickException as error:
        return error.format_message()
    return ""


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_of_a_page_is_one(page: Path) -> None:
    wrong = [f"outlast {shlex.join(words)}: {why}" for words in _commands(page) if (why := _check_command(words))]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_command_would_be_noticed() -> None:
    assert _check_command(["submitt", "RUN.yaml"])
    assert _check_command(["status", "--wach"])
    assert _check_command(["report"])
    assert not _check_command(["submit", "RUN.yaml", "--set", "lr=2e-4"])


def test_the_readme_names_every_command_and_exit_code() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, entry in root.COMMANDS.items():
        assert entry.hidden or f"`outlast {name}" in text, f"outlast {name} is not in README.md"
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {root.DONE, root.FAILED, root.WRONG, root.HELD, root.UNFIT, root.AGAIN, root.STOPPED}


def _leaves(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _leaves(below, (*path, name))
    else:
        yield " ".join(path), command


# `outlast check` reads its words itself: the standard library alone, see monitors/gate.py
LEAVES = {name: command for name, command in _leaves(root.cli, ("outlast",)) if name != "outlast check"}


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_tells_its_exit_codes_and_options(name: str) -> None:
    command = LEAVES[name]
    assert "Exit codes" in (command.help or "") or name == "outlast config schema", f"{name} --help tells no exit codes"
    silent = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
    assert not silent, f"{name} --help: options without a word: {silent}"


# ---------------------------------------------------------------- run files


def _run_files() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, (kind, block) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
            if kind == "yaml" and re.search(r"^name:", block, re.MULTILINE):
                yield f"{_name(page)}#{number}", block


RUN_FILES = {
    **dict(_run_files()),
    **{_name(path): path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "examples").glob("*.yaml"))},
}


def test_the_readme_shows_a_run_file() -> None:
    assert any(where.startswith("README.md") for where in RUN_FILES)


@pytest.mark.parametrize("where", RUN_FILES)
def test_a_shown_run_file_is_accepted(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`outlast config check`, with the files that it names in place."""
    text = RUN_FILES[where]
    asked = yaml.safe_load(text)
    if webhook := asked.get("notify", {}).get("webhook_file"):
        secret = tmp_path / webhook
        secret.write_text("https://example.org/hook")
        secret.chmod(0o600)
    if script := asked["task"].get("script"):
        place = tmp_path / asked["task"].get("workdir", "") / script
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with contextlib.chdir(tmp_path):
        code = root.start(["config", "check", str(path)])
    said = capsys.readouterr()
    assert code == 0, said.err + said.out


def test_every_setting_is_documented_with_its_default() -> None:
    """docs/run-file.md has one table row a setting: | `cluster.nodes` | default | meaning |"""
    text = (ROOT / "docs" / "run-file.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", text, re.MULTILINE))
    wanted = {".".join(key): setting for key, setting in SETTINGS.items()}
    assert set(rows) == set(wanted), f"missing {set(wanted) - set(rows)}, unknown {set(rows) - set(wanted)}"
    for name, setting in wanted.items():
        shown = rows[name].strip().strip("`")
        if setting.required:
            assert shown == "required", name
        else:
            assert shown == _default(setting.default), (
                f"{name}: {shown!r}, the default is {_default(setting.default)!r}"
            )


def _default(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g} s"
    if value in ("", None, (), {}):
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------- links, files, tests, places

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OURS = re.compile(
    r"^(?:reliability|monitors|slurm|launchers|checkpoint|tests|docs|outlast)/[\w./*-]+\.(?:py|yaml|md|svg|sbatch|txt)$"
)
TEST = re.compile(r"^(tests/[\w/]+\.py)::(\w+)$")


def _slug(title: str) -> str:
    words = re.sub(r"[^\w\- ]", "", title.strip().lower().replace("`", ""))
    return words.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target in LINK.findall(_prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        if not file.exists():
            lost.append(target)
        elif anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(_slug, titles):
                lost.append(target)
    assert not lost, f"{_name(page)}: {lost}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    lost = []
    for word in INLINE.findall(_prose(page)):
        if named := TEST.match(word):
            path = ROOT / named[1]
            if not path.exists() or named[2] not in _tests(path):
                lost.append(word)
        elif OURS.match(word) and not list(ROOT.glob(word)):
            lost.append(word)
    assert not lost, f"{_name(page)}: {lost}"


def _tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_law_of_the_architecture_names_its_test() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    laws = text.partition("\n## Laws")[2].partition("\n## ")[0]
    rows = [line for line in laws.splitlines() if line.startswith("| ") and not re.match(r"\| (law|---)", line)]
    assert len(rows) >= 8
    bare = [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+`", row)]
    assert not bare, "\n".join(bare)


PLACES = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/|[\w-]+\.internal\b")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_page_knows_the_machine_it_was_written_on(page: Path) -> None:
    found = [line for line in page.read_text(encoding="utf-8").splitlines() if PLACES.search(line)]
    assert not found, "\n".join(found)


# ---------------------------------------------------------------- decisions

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in DECISIONS if path.name[:4].isdigit()]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("page", [p for p in DECISIONS if p.name[:4].isdigit()], ids=_name)
def test_a_decision_says_why_what_and_what_it_costs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.match(r"# \d{4} .+\n", text)
    for title in ("## Context", "## Choice", "## What we gave up"):
        assert f"\n{title}\n" in text, f"{_name(page)} has no {title!r}"
