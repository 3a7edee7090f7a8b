"""Runs in the simulated world write thousands of fsynced lines: in memory where that is to be had."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="outlast-core-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield place
    shutil.rmtree(place, ignore_errors=True)
