"""One real Slurm for all tests that need one: eight nodes with eight pretended GPUs each, accounting on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from outlast.slurm.testbed import Testbed

# no deadline: a shared machine is slow at times, and slow is no fault of the code under test. The same examples each
# time, so that a red run can be repeated; `make test-long` looks for new ones
settings.register_profile("same", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("OUTLAST_HYPOTHESIS", "same"))


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """Started once a session (and process) and destroyed at its end. SLURM_CONF names it meanwhile.

    Tests that change it take `idle_testbed`.
    """
    # not under tmp_path: Slurm's sockets need a short directory
    place = Path(tempfile.mkdtemp(prefix="outlast-slurm-", dir="/tmp"))
    bed = Testbed(place, nodes=8, gpus=8)
    before = os.environ.get("SLURM_CONF")
    try:
        bed.start()
        os.environ["SLURM_CONF"] = bed.slurm_conf
        yield bed
    finally:
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before
        bed.destroy()
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def idle_testbed(testbed: Testbed) -> Iterator[Testbed]:
    """The shared testbed with no jobs and all nodes idle; what the test leaves running is ended."""
    testbed.reset()
    yield testbed
    testbed.run(["scancel", "-Q", "-u", testbed.spec.user])
