"""The corpus through Megatron-core's indexed data set: built once, read exactly, never half there."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.launchers.trainer_args import TrainerError

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

TEXTS = {"a.py": "abcdefghij", "b.py": "", "c.py": "xy", "d.py": "0123456789ABCDEFG"}


@pytest.fixture
def data() -> Any:
    from outlast.launchers import trainer_data

    return trainer_data


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    (folder / "_sysconfigdata_here.py").write_text("machine = 'specific'" * 9)
    return folder


def test_windows_cover_each_file_and_cross_none(data: Any, source: Path, tmp_path: Path) -> None:
    corpus = data.open_corpus(tmp_path / "data", seq=4, max_bytes=1000, source=source)
    texts = [bytes(corpus.tokens(i).tolist()).decode() for i in range(corpus.samples)]
    assert texts == ["abcde", "efghi", "01234", "45678", "89ABC", "CDEFG"]


def test_the_cap_takes_files_by_name(data: Any, source: Path) -> None:
    assert [p.name for p in data.source_files(source, 11)] == ["a.py", "b.py", "c.py"]


def test_many_builders_make_one_corpus(data: Any, source: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def build() -> None:
        queue.put(data.open_corpus(tmp_path / "data", seq=4, max_bytes=1000, source=source).identity)

    processes = [context.Process(target=build) for _ in range(4)]
    for process in processes:
        process.start()
    identities = {queue.get() for _ in processes}
    for process in processes:
        process.join(30)
    assert len(identities) == 1
    assert sorted(p.name for p in (tmp_path / "data").iterdir() if not p.name.startswith(".build")) == [
        p.name for p in (tmp_path / "data").glob("stdlib-*")
    ]


def test_a_changed_corpus_is_refused(data: Any, source: Path, tmp_path: Path) -> None:
    data.open_corpus(tmp_path / "data", seq=4, max_bytes=1000, source=source)
    (binary,) = (tmp_path / "data").glob("stdlib-*/corpus.bin")
    raw = bytearray(binary.read_bytes())
    raw[3] ^= 1
    binary.write_bytes(raw)
    with pytest.raises(TrainerError, match=r"does not match its digest\. Remove the folder"):
        data.open_corpus(tmp_path / "data", seq=4, max_bytes=1000, source=source)


def test_a_python_without_sources_is_told_so(data: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainerError, match=r"no \*.py there"):
        data.open_corpus(tmp_path / "data", seq=4, max_bytes=1000, source=tmp_path / "empty")
    with pytest.raises(TrainerError, match="no document is longer"):
        short = tmp_path / "short"
        short.mkdir()
        (short / "a.py").write_text("ab")
        data.open_corpus(tmp_path / "data2", seq=4, max_bytes=1000, source=short)


def test_a_build_that_died_leaves_no_corpus(
    data: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_folder: Path) -> str:
        raise KeyboardInterrupt

    real: Callable[[Path], str] = data._digest
    monkeypatch.setattr(data, "_digest", die)
    with pytest.raises(KeyboardInterrupt):
        data.open_corpus(tmp_path / "data", seq=4, max_bytes=1000, source=source)
    assert not list((tmp_path / "data").glob("stdlib-*"))
    monkeypatch.setattr(data, "_digest", real)
    assert data.open_corpus(tmp_path / "data", seq=4, max_bytes=1000, source=source).samples == 6
    assert os.listdir(tmp_path / "data")


def test_the_real_standard_library_is_text_enough(data: Any, data_dir: Path) -> None:
    corpus = data.open_corpus(data_dir, seq=32, max_bytes=2_000_000)
    assert corpus.samples > 50_000
    assert b"import" in b"".join(bytes(corpus.tokens(i).tolist()) for i in range(200))
