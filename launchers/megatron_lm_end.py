"""The end of a rank when nothing is to be saved any more: told by a file beside the stop file.

SIGTERM means a save to Megatron-LM, and it cannot say who sent it or why; a rank that waits in a collective would not
even see it. So an agent whose supervisor wants no save makes the file before it sends SIGTERM: a thread looks for it,
and so does every save before it touches anything. What a convicted node holds in memory never becomes a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

from outlast.launchers.recorder import STOP_FILE_ENV

END_FILE: Final = "end"
LOOK_S: Final = 0.2
ENDED: Final = 128 + 15


def watch() -> None:
    """End this rank, with its data workers and writers, once the file is there."""
    if _file() is not None:
        threading.Thread(target=_look_on, name="outlast-end", daemon=True).start()


def end_if_told() -> None:
    """Does not return where the attempt ends without a save."""
    path = _file()
    if path is None or not path.exists():
        return
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(ENDED)


def _look_on() -> None:
    while True:
        end_if_told()
        time.sleep(LOOK_S)


def _file() -> Path | None:
    stop = os.environ.get(STOP_FILE_ENV, "")
    return Path(stop).with_name(END_FILE) if stop else None
