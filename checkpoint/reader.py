"""Loading: a committed checkpoint into the state dict of any layout, and never one that is not whole.

`.metadata` and `common.pt` are pickles, so nothing is unpickled before the hashes of the manifest hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from outlast.checkpoint.manifest import Manifest


def load(
    sharded_state_dict: dict[str, Any],
    path: Path | str,
    *,
    verify: str = "hashes",
    process_group: dist.ProcessGroup | None = None,
    strict: str = "assume_ok_unexpected",
) -> tuple[dict[str, Any], Manifest]:
    """The state dict filled from `path`, and the checkpoint's manifest. Collective over all ranks.

    Raises NotWhole on every rank, before anything is unpickled, where COMMITTED is missing or a file is not what the
    manifest says. verify='hashes' reads each file once over all ranks; 'sizes' trusts a check made just before.
    `strict` is dist_checkpointing's.
    """
    raise NotImplementedError


def load_common(path: Path | str, *, verify: str = "hashes") -> tuple[dict[str, Any], Manifest]:
    """The unsharded part alone (common.pt), on this rank alone. The same refusals as load()."""
    raise NotImplementedError
