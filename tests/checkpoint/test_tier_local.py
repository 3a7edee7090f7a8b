"""Local checkpoints: parts on nodes, copies on peers, over real processes and sockets; any one node may be lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.checkpoint import shelf_wire as w
from outlast.checkpoint.bringing import bring
from outlast.checkpoint.catalogue import survey
from outlast.checkpoint.commit import commit, write_bytes
from outlast.checkpoint.errors import CheckpointError, NotWhole
from outlast.checkpoint.local_tier import LocalTier
from outlast.checkpoint.manifest import FileEntry, Manifest, hash_bytes
from outlast.checkpoint.names import name_step
from outlast.checkpoint.ops import RealOps
from outlast.checkpoint.shelf import KILL_AT, POINTS, Shelf, ShelfTask
from outlast.checkpoint.shelf_box import Box
from outlast.checkpoint.shelf_link import call
from outlast.checkpoint.shelf_peers import choose_peers, domain_of
from outlast.checkpoint.shelf_roster import Registration, Roster, find_holders
from outlast.checkpoint.shelf_wire import ShelfError
from outlast.checkpoint.tiered import Near, TieredStore
from outlast.checkpoint.tiers import Tier
from outlast.checkpoint.verify import verify
from outlast.reliability.model import Layout, Node

SECRET = bytes(range(32))
NODES = ("a", "b", "c")


# ---------------------------------------------------------------- whose copy lies where

DOMAINS = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.sampled_from(["", "r1", "r2", "r3", "r4"]))


@given(domains=DOMAINS)
def test_losing_any_one_node_leaves_every_part_somewhere(domains: dict[str, str]) -> None:
    peers = choose_peers({Node(n): d for n, d in domains.items()})
    if len(domains) < 2:
        assert peers == {}
        return
    assert set(peers) == set(domains)
    assert sorted(peers.values()) == sorted(domains), "every node keeps the parts of exactly one other"
    for lost in domains:
        assert all({node, peer} - {lost} for node, peer in peers.items())


@given(domains=DOMAINS)
def test_a_peer_is_outside_the_failure_domain_wherever_that_can_be(domains: dict[str, str]) -> None:
    peers = choose_peers({Node(n): d for n, d in domains.items()})
    size = {d: sum(1 for other in domains.values() if other == d) for d in domains.values() if d}
    largest = max(size.values(), default=1)
    inside = [n for n, p in peers.items() if domains[n] and domains[n] == domains[p]]
    assert len(inside) == (max(0, 2 * largest - len(domains)) if peers else 0), "no fewer are possible"


def test_the_same_nodes_give_the_same_peers_in_any_order() -> None:
    domains = {Node("n1"): "r1", Node("n2"): "r1", Node("n3"): "r2", Node("n4"): "r2"}
    assert choose_peers(domains) == choose_peers(dict(reversed(domains.items())))
    assert domain_of("spine.leaf3.node17") == "spine.leaf3" and domain_of("node17") == domain_of("") == ""


# ---------------------------------------------------------------- nodes of a test


class Site:
    """A shared directory, a box and a shelf process for each node."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.local = LocalTier(root / "checkpoints")
        self.roster = Roster(folder=root / "shelves", secret=SECRET, me=Node("head"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (root / "secret").write_text(SECRET.hex())

    def box(self, node: str) -> Box:
        return Box(self.root / f"node-{node}" / "run")

    def task(self, node: str, **how: object) -> ShelfTask:
        task = ShelfTask(
            node=Node(node),
            host="127.0.0.1",
            checkpoints=str(self.root / "checkpoints"),
            box=str(self.box(node).root),
            roster=str(self.root / "shelves"),
            secret_file=str(self.root / "secret"),
        )
        return msgspec.structs.replace(task, **how)

    def start(self, *nodes: str, kill_at: str = "") -> None:
        for node in nodes:
            self.processes[node] = subprocess.Popen(
                [sys.executable, "-m", "outlast.checkpoint.shelf", msgspec.json.encode(self.task(node)).decode()],
                stderr=open(self.root / f"{node}.log", "ab"),  # noqa: SIM115 -- the child's
                env={**os.environ, KILL_AT: kill_at},
            )
        for node in nodes:
            if not kill_at:
                until(lambda node=node: self.answers(node))  # type: ignore[misc]

    def answers(self, node: str) -> bool:
        try:
            with self.roster.call(self.roster.all()[Node(node)]):
                return True
        except (KeyError, CheckpointError):
            return False

    def lose(self, node: str) -> None:
        """The node is gone, and so is what was on it."""
        if process := self.processes.pop(node, None):
            process.kill()
            process.wait(10)
        shutil.rmtree(self.root / f"node-{node}", ignore_errors=True)

    def stop(self, node: str) -> None:
        process = self.processes.pop(node)
        process.kill()
        process.wait(10)

    def save(self, step: int, nodes: tuple[str, ...] = NODES, size: int = 3000) -> Manifest:
        """A local checkpoint: each node writes a part, then it is committed."""
        ops, index, shards, parts = RealOps(), {}, {}, {}
        directory = self.local.path(step)
        directory.mkdir(parents=True)
        for name in (".metadata", "common.pt", "metadata.json"):
            index[name] = write_bytes(ops, directory / name, f"{name} {step}".encode())
        for rank, node in enumerate(nodes):
            name, raw = f"__{rank}_0.distcp", f"{node} {step} ".encode() * size
            entry = FileEntry(size_bytes=len(raw), xxh3_128=hash_bytes(raw))
            self.box(node).put(step, name, entry, iter([raw]))
            shards[name], parts[name] = entry, Node(node)
        files = {**index, **shards}
        manifest = Manifest(
            schema=1, train_step=step, samples=step, layout=Layout(), files=files, made_at_s=time.time()
        )
        self.local.commit(manifest, parts)
        return self.local.read(step)[0]

    def bring(self, node: str, step: int) -> Path:
        roster = Roster(folder=self.roster.folder, secret=SECRET, me=Node(node))
        return bring(self.local, step, self.box(node), roster)

    def copied(self, step: int) -> bool:
        return self.local.tier(step) is Tier.COPIED


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    one = Site(tmp_path)
    yield one
    for node in list(one.processes):
        one.stop(node)


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.02)


def held(site: Site, step: int) -> Mapping[str, tuple[Node, ...]]:
    return find_holders(site.local, site.roster, step)[0]


# ---------------------------------------------------------------- losing nodes


@pytest.mark.slow
@pytest.mark.parametrize("lost", NODES)
def test_whichever_node_is_lost_all_parts_come_back(site: Site, lost: str) -> None:
    manifest = site.save(30)
    assert site.local.tier(30) is Tier.LOCAL and site.local.steps() == (30,)
    site.start(*NODES)
    until(lambda: site.copied(30))
    assert all(len(nodes) == 2 for nodes in held(site, 30).values())
    site.lose(lost)
    holders, missing = find_holders(site.local, site.roster, 30)
    assert not missing and all(Node(lost) not in nodes and nodes for nodes in holders.values())
    # the spare that takes its place, and one that stayed
    for node in ("z", *(set(NODES) - {lost})):
        path = site.bring(node, 30)
        assert verify(path) == manifest, "an ordinary checkpoint, whole"


@pytest.mark.slow
def test_without_a_copy_a_lost_node_is_said_and_nothing_is_believed(site: Site) -> None:
    site.save(30)
    for node in NODES[1:]:
        site.start(node)
    # nobody can have copied a's part: its shelf never ran
    site.lose("a")
    _, missing = find_holders(site.local, site.roster, 30)
    assert missing == ["__0_0.distcp: not on a, whole"]
    with pytest.raises(NotWhole, match="__0_0"):
        site.bring("b", 30)


@pytest.mark.slow
def test_a_rotten_part_is_brought_from_the_copy(site: Site) -> None:
    manifest = site.save(30)
    site.start(*NODES)
    until(lambda: site.copied(30))
    path = site.box("a").directory(30) / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 4
    path.write_bytes(raw)
    holders = held(site, 30)
    assert Node("a") not in holders["__0_0.distcp"] and holders["__0_0.distcp"]
    assert verify(site.bring("a", 30)) == manifest
    # a shelf that hands out what is not in the manifest is not believed either: the other holder is asked
    path.write_bytes(bytes(raw))
    assert verify(site.bring("z", 30)) == manifest


@pytest.mark.slow
def test_only_what_is_asked_for_is_brought(site: Site) -> None:
    site.save(30)
    site.start(*NODES)
    roster = Roster(folder=site.roster.folder, secret=SECRET, me=Node("z"))
    path = bring(site.local, 30, site.box("z"), roster, names={"__1_0.distcp", "no such"})
    assert sorted(p.name for p in path.glob("*.distcp")) == ["__1_0.distcp"]


@pytest.mark.slow
def test_a_silent_peer_is_replaced_and_old_parts_go(site: Site) -> None:
    site.start(*NODES)
    site.stop("b")  # its registration stays
    site.save(10, ("a", "c"))
    until(lambda: site.copied(10))
    assert set(site.local.copies(10).values()) == {"a", "c"}
    for step in (20, 30, 40):
        site.save(step, ("a", "c"))
    until(lambda: site.local.steps() == (30, 40))
    until(lambda: site.box("a").steps() == (30, 40) and site.box("c").steps() == (30, 40))
    until(lambda: site.copied(40))


def shared(site: Site, step: int) -> None:
    ops, directory = RealOps(), site.root / "checkpoints" / name_step(step)
    directory.mkdir(parents=True)
    files = {"__0_0.distcp": write_bytes(ops, directory / "__0_0.distcp", b"shared")}
    commit(ops, directory, Manifest(schema=1, train_step=step, samples=step, layout=Layout(), files=files))


def store_of(site: Site, **suspects: float) -> TieredStore:
    found = {Node(node): since_s for node, since_s in suspects.items()}
    near = Near(local=site.local, roster=site.roster, suspects=lambda: found)
    return TieredStore(site.root / "checkpoints", near=near)


def chosen(store: TieredStore, *quarantined: int) -> str:
    restore = store.choose(quarantined=quarantined).restore
    return restore.path.rpartition("checkpoints/")[2] if restore else ""


@pytest.mark.slow
def test_the_newest_over_all_tiers_is_chosen_and_of_one_step_the_nearest(site: Site) -> None:
    shared(site, 20)
    site.save(10)
    site.save(20)
    site.save(30)
    site.start(*NODES)
    until(lambda: site.copied(20) and site.copied(30))
    assert chosen(store_of(site)) == "local/iter_0000030"
    assert chosen(store_of(site), 30) == "local/iter_0000020"
    # what is newer than the choice belongs to a past that the run has left
    assert 30 not in site.local.steps() and (site.local.root / "quarantine" / "iter_0000030").is_dir()
    rows = {row.name: row for row in survey(site.root / "checkpoints")}
    assert rows["local/iter_0000020"].tier == Tier.COPIED and rows["iter_0000020"].tier == Tier.SHARED


@pytest.mark.slow
def test_a_local_one_that_is_nowhere_whole_is_passed_over_with_its_reason(site: Site) -> None:
    shared(site, 20)
    site.save(30)
    site.start("b", "c")
    site.lose("a")
    choice = store_of(site).choose(quarantined=())
    assert choice.restore is not None and choice.restore.path.endswith("checkpoints/iter_0000020")
    assert [bad.why for bad in choice.passed_over] == ["__0_0.distcp: not on a, whole"]
    assert choice.passed_over[0].unfinished, "told, and no incident: a lost node is one already"


@pytest.mark.slow
def test_what_a_suspect_had_a_hand_in_is_not_taken(site: Site) -> None:
    shared(site, 20)
    for step in (30, 40):
        site.save(step)
    site.start(*NODES)
    until(lambda: site.copied(40) and site.copied(30))
    assert chosen(store_of(site, b=time.time() - 5)) == "iter_0000020"
    site.save(50)
    until(lambda: site.copied(50))
    assert chosen(store_of(site, b=time.time() + 3600, z=0.0)) == "local/iter_0000050", "saved long before; not a part"
    # a shared one that is set aside takes the local ones since the one before along
    shared(site, 60)
    store_of(site).quarantine(60, "not as saved")
    assert site.local.steps() == () and chosen(store_of(site), 60) == "iter_0000020"


# ---------------------------------------------------------------- killed in the middle


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_shelf_killed_at_every_point_of_a_copy(site: Site, point: str) -> None:
    manifest = site.save(30, ("a", "b"))
    site.start("b")
    site.start("a", kill_at=point)
    assert site.processes["a"].wait(60) == -signal.SIGKILL
    assert ("a" in site.local.copies(30)) == (point == "copy.noted")
    site.stop("a")
    site.start("a")
    until(lambda: site.copied(30))
    site.lose("a")
    assert verify(site.bring("z", 30)) == manifest


@pytest.mark.slow
def test_the_receiving_shelf_killed_in_the_middle_of_a_part(site: Site) -> None:
    manifest = site.save(30, ("a", "b"), size=24_000_000)
    site.start("b")
    site.start("a")
    drafts = site.box("b").directory(30)
    until(lambda: any(p.name.startswith(".__0") for p in drafts.glob(".*")))
    site.stop("b")
    assert not (drafts / "__0_0.distcp").exists(), "nothing half has a name"
    assert "a" not in site.local.copies(30)
    site.start("b")
    assert not list(drafts.glob(".__0*")), "what was left half received is gone"
    site.stop("a")
    site.start("a")  # its memory of the silent peer is gone with it
    until(lambda: site.copied(30))
    site.lose("a")
    assert verify(site.bring("z", 30)) == manifest


# ---------------------------------------------------------------- who may speak, and what


def test_a_place_of_others_is_refused(tmp_path: Path) -> None:
    box = Box(tmp_path / "own" / "run")
    box.claim()
    box.claim()
    assert box.root.stat().st_mode & 0o777 == 0o700
    box.root.chmod(0o755)
    box.claim()
    assert box.root.stat().st_mode & 0o777 == 0o700
    box.root.rmdir()
    box.root.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory of this user's"):
        box.claim()
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    with pytest.raises(CheckpointError, match="all may write"):
        Box(tmp_path / "all" / "run").claim()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a place"):
        Box(tmp_path / "file" / "run").claim()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[tuple[Shelf, Registration]]:
    one = Shelf(Site(tmp_path).task("a"), SECRET)
    one.start()
    yield one, one.roster.all()[Node("a")]
    one.close()


def test_a_wrong_secret_gets_nothing_on_either_side(shelf: tuple[Shelf, Registration]) -> None:
    _, there = shelf
    address = (there.host, there.port)
    with pytest.raises(ShelfError, match="proof of the shelf"):
        call(address, bytes(32), Node("b"), Node("a"))
    with pytest.raises(ShelfError, match="expected 'z'"):
        call(address, SECRET, Node("b"), Node("z"))
    # a caller that answers the challenge without the secret
    with socket.create_connection(address, 5) as sock:
        sock.settimeout(10)
        payload = w.encode(w.Open(protocol=1, node="b", nonce=bytes(32)))
        sock.sendall(w.LENGTH.pack(len(payload)) + payload)
        assert w.LENGTH.unpack(sock.recv(4))[0] > 100
        sock.recv(4096)
        payload = w.encode(w.Answer(proof=bytes(32)))
        sock.sendall(w.LENGTH.pack(len(payload)) + payload)
        assert sock.recv(10) == b"", "hung up"
    with call(address, SECRET, Node("b"), Node("a")) as channel:
        assert channel.ask(w.Look(train_step=1, names=("x",))) == w.Files(files={})


def test_names_that_lead_elsewhere_are_refused(shelf: tuple[Shelf, Registration]) -> None:
    one, there = shelf
    (one.box.root / "secret").write_text("s")
    for name in ("../secret", "a/b", ".hidden", "x\n", "manifest.json"):
        for ask in (w.Get(train_step=1, name=name), w.Look(train_step=1, names=("x", name))):
            with pytest.raises(ShelfError, match="nothing was opened"):
                w.decode_ask(w.encode(ask))
        with call((there.host, there.port), SECRET, Node("b"), Node("a")) as channel:
            channel.send(w.Get(train_step=1, name=name))
            with pytest.raises((ShelfError, OSError)):
                channel.ask(w.Look(train_step=1, names=()))
    assert one.box.steps() == ()


def test_a_part_that_is_not_what_was_announced_gets_no_name(shelf: tuple[Shelf, Registration]) -> None:
    one, there = shelf
    entry = FileEntry(size_bytes=4, xxh3_128=hash_bytes(b"good"))
    with call((there.host, there.port), SECRET, Node("b"), Node("a")) as channel:
        with pytest.raises(ShelfError, match="were announced"):
            channel.ask(w.Put(train_step=1, name="__0_0.distcp", entry=entry), data=iter([b"evil"]))
        # the connection goes on, and what is right is kept
        assert channel.ask(w.Put(train_step=1, name="__0_0.distcp", entry=entry), data=iter([b"go", b"od"])) == w.Kept()
        with pytest.raises(ShelfError, match="not here"):
            channel.ask(w.Get(train_step=1, name="__9_0.distcp"))
        huge = FileEntry(size_bytes=1 << 60, xxh3_128=hash_bytes(b""))
        channel.send(w.Put(train_step=2, name="__0_0.distcp", entry=huge))
    until(lambda: [p.name for p in one.box.root.rglob("*") if p.is_file()] == ["__0_0.distcp"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=300))
def test_garbage_ends_a_connection_and_nothing_else(shelf: tuple[Shelf, Registration], junk: bytes) -> None:
    one, there = shelf
    with socket.create_connection((there.host, there.port), 5) as sock, suppress(OSError):
        sock.sendall(junk)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(10)
        while sock.recv(4096):
            pass  # a challenge at most
    with call((there.host, there.port), SECRET, Node("b"), Node("a")) as channel:
        assert isinstance(channel.ask(w.Look(train_step=1, names=())), w.Files)
    assert one.box.steps() == ()


@given(junk=st.binary(max_size=200))
def test_no_bytes_decode_to_something_unforeseen(junk: bytes) -> None:
    """Refused by name, or understood as what it would have been written as."""
    for read in (w.decode_ask, w.decode_reply, lambda raw: w.decode(raw, w.Open)):
        try:
            said = read(junk)
        except ShelfError as error:
            assert "expected" in str(error) or "nothing was opened" in str(error)
            continue
        assert read(w.encode(said)) == said


@given(flip=st.integers(0, 8 * (w.HEAD.size + 5) - 1))
def test_any_flipped_bit_of_a_sealed_frame_is_found(flip: int) -> None:
    key = bytes(32)
    frame = bytearray(w.Seal(key, caller=True).head(w.MESSAGE, b"hello") + b"hello")
    frame[flip // 8] ^= 1 << flip % 8
    shelf_end = w.Seal(key, caller=False)
    head, payload = bytes(frame[: w.HEAD.size]), bytes(frame[w.HEAD.size :])
    with pytest.raises(ShelfError):
        if shelf_end.read_head(head, w.MESSAGE) != len(payload):
            raise ShelfError("another length: the stream is out of step")
        shelf_end.open(head, payload)
    # reflected, and replayed
    whole = w.Seal(key, caller=True).head(w.MESSAGE, b"hello")
    with pytest.raises(ShelfError):
        w.Seal(key, caller=True).open(whole, b"hello")
    shelf_end = w.Seal(key, caller=False)
    shelf_end.open(whole, b"hello")
    with pytest.raises(ShelfError):
        shelf_end.open(whole, b"hello")


# ---------------------------------------------------------------- what lies on the shared file system


def test_a_commit_needs_its_index_and_parts_are_bound_to_it(site: Site) -> None:
    site.save(10)
    (site.local.path(10) / "parts.json").write_bytes(b'{"nodes":{}}')
    with pytest.raises(NotWhole, match=r"parts.json: not as its manifest says"):
        site.local.read(10)
    manifest = site.save(20)
    # a copy's record counts for the save that it was made of alone
    site.local.note_copy(20, Node("a"), Node("b"), manifest, site.local.read(20)[1])
    assert site.local.copies(20) == {"a": "b"} and not site.copied(20)
    record = (site.local.path(20) / "copied-a.json").read_bytes()
    shutil.rmtree(site.local.path(20))
    site.save(20, size=2)
    (site.local.path(20) / "copied-a.json").write_bytes(record)
    assert site.local.copies(20) == {}
    (site.local.path(20) / "copied-b.json").write_bytes(b"\xff{")
    assert site.local.copies(20) == {}
