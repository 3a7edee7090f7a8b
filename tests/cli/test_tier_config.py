"""`tiers:` in RUN.yaml: what is refused, and in which words."""

from __future__ import annotations

import pytest

from outlast.launchers import adapt
from outlast.reliability.config_checks import check_together, describe
from outlast.reliability.runfile import Checkpoint, Cluster, RunFile, Task, Tiers

TRAINER = Task(module="outlast.launchers.trainer")
LOCAL = Tiers(local_dir="/dev/shm/x/%n", local_every_steps=10)


def said(tiers: Tiers, *, kind: str = "slurm", every_steps: int = 100) -> dict[str, str]:
    run = RunFile(
        name="lm",
        task=TRAINER,
        cluster=Cluster(kind=kind),
        checkpoint=Checkpoint(every_steps=every_steps),
        tiers=tiers,
        train_steps=10,
    )
    return {one.path: one.text for one in check_together(run)}


def test_what_fits_is_accepted_and_described() -> None:
    both = Tiers(local_dir="/dev/shm/x/%n", local_every_steps=10, remote_url="s3://bucket/a", remote_every=4)
    assert said(Tiers()) == said(LOCAL, kind="local") == said(both) == {}
    lines = "\n".join(describe(RunFile(name="lm", task=TRAINER, tiers=both)))
    assert "one every 10 train_steps on the nodes" in lines and "one of 4 is copied to s3://bucket/a" in lines


@pytest.mark.parametrize(
    ("tiers", "path", "words"),
    [
        (Tiers(remote_url="bucket/prefix"), "$.tiers.remote_url", "no URL"),
        (Tiers(remote_url="s3://key:secret@bucket/x"), "$.tiers.remote_url", "keys come from the environment"),
        (Tiers(local_dir="memory", local_every_steps=10), "$.tiers.local_dir", "no path from the root"),
        (Tiers(local_dir="/nvme"), "$.tiers.local_every_steps", "0 takes none"),
        (Tiers(local_dir="/nvme", local_every_steps=100), "$.tiers.local_every_steps", "expected less"),
        (Tiers(local_every_steps=5), "$.tiers.local_every_steps", "of no use without local_dir"),
    ],
)
def test_what_does_not_fit_is_told(tiers: Tiers, path: str, words: str) -> None:
    found = said(tiers)
    assert list(found) == [path] and words in found[path]
    assert "secret" not in found[path], "a key that was written here is not repeated"


def test_on_one_machine_each_node_needs_a_place_of_its_own() -> None:
    found = said(Tiers(local_dir="/dev/shm/x", local_every_steps=10), kind="local")
    assert "%n" in found["$.tiers.local_dir"]


@pytest.mark.parametrize("task", [Task(script="train.py"), Task(script="pretrain_gpt.py"), Task(command=("./train",))])
def test_kinds_that_cannot_save_to_their_nodes_refuse_it_by_name(task: Task) -> None:
    run = RunFile(name="lm", task=task, tiers=LOCAL)
    complaints = dict(adapt.complain(run))
    assert "only the reference trainer can" in complaints["$.tiers.local_dir"]
    assert "$.tiers.local_dir" not in dict(adapt.complain(RunFile(name="lm", task=task)))
