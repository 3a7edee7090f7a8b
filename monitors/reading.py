"""What a line was recognised as, before anything is said of its meaning."""

from __future__ import annotations

from outlast.reliability.model import Noun


class Reading(Noun, frozen=True, kw_only=True):
    """One line, or one block of lines. Its meaning is a row of the catalogue: by `key`, or by `kind` and `code`."""

    kind: str
    """xid sxid not_xid aer edac mce kernel oom nic pcie_width lustre nfs nvidia_smi dcgm_diag dcgm_exporter
    fabric_manager cuda nccl_timeout nccl_net nccl_err flight_recorder gloo python megatron megatron_rerun
    megatron_straggler slurm ..."""
    key: str = ""
    table: str = "kernel"
    """kernel | rank_log: where the key's row is."""
    code: int | None = None
    node: str | None = None
    """The node that the line is about, where it says so."""
    gpu: str | None = None
    """PCI address dddd:bb:dd, or the index that a tool prints."""
    text: str = ""
    """The message without its prefix."""
    companion: bool = False
    """A further line of an event that another line tells: same class, nothing to do."""
    fatal: bool | None = None
    """The line's own word about severity, where it has one."""
    caused_by: int | None = None
    unreadable: bool = False
    """It looks like one of ours but cannot be read: kept, counted, never guessed."""
    note: str = ""
    """What was seen, for `because`; '' where the table's meaning says it all."""
