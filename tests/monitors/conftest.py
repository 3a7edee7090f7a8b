"""The stand-in for NVIDIA's library, compiled once a session: nvidia-ml-py goes through it unmodified."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FAKE = Path(__file__).parent.parent / "data" / "nvml" / "fake_nvml.c"


class FakeNvml:
    """A directory with the library, and the files by which a test steers it."""

    def __init__(self, library: Path, place: Path) -> None:
        self.library = library
        self.state, self.events = place / "state", place / "events"
        self.state.write_text("")
        os.mkfifo(self.events)
        # somebody must hold the writing end, or the reader would see it end
        self._fifo = os.open(self.events, os.O_RDWR)

    def env(self, **more: str) -> dict[str, str]:
        """For a process that is to use it."""
        return {
            "LD_LIBRARY_PATH": str(self.library),
            "FAKE_NVML_STATE": str(self.state),
            "FAKE_NVML_EVENTS": str(self.events),
            **more,
        }

    def set(self, *lines: str) -> None:
        """The GPUs' values from now on: `GPU FIELD VALUE`."""
        aside = self.state.with_suffix(".new")
        aside.write_text("".join(f"{line}\n" for line in lines))
        aside.rename(self.state)

    def xid(self, gpu: int, code: int) -> None:
        os.write(self._fifo, f"{gpu} {code}\n".encode())

    def close(self) -> None:
        os.close(self._fifo)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("nvml-library")
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed: apt-get install gcc"
    words = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*words, "-o", str(place / "libnvidia-ml.so.1"), str(FAKE)], check=True, timeout=60)
    return place


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    fake = FakeNvml(nvml_library, tmp_path)
    yield fake
    fake.close()
