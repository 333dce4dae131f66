"""``ds-layerwise links`` on every rank: what it measures, writes and refuses, on nodes that tests pretend."""

import json
import os
import re
import subprocess
import sys
import textwrap

import deepspeed.comm as dist
import pytest
from deepspeed.launcher import launch

from ds_layerwise.plan.network.links import LINKS, Links, find_links
from ds_layerwise.ranks.comm import comm, nodes
from ds_layerwise.tools.dry_run import DryRun
from ds_layerwise.tools.links import link_timing, measure_links
from tests.support.cli import run
from tests.support.documents import ROOT
from tests.support.harness import DistributedTest, device, free_port
from tests.support.rooms import rooms

pytestmark = rooms("link_timing", "measure_links", "link_fit", "process_exit", "cli")

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 1e-3, "muon_lr": 0.02}}}


@pytest.fixture
def short(monkeypatch):
    """No longer messages than it takes to tell their time from the noise of a busy machine."""
    monkeypatch.setattr(link_timing, "_LONGEST_ON_HOST", 2**24)
    monkeypatch.setattr(link_timing, "_REPETITIONS", 5)


def pretend(patch, per_node):
    patch.setattr(nodes, "node_of_each_rank", lambda: [r // per_node for r in range(dist.get_world_size())])


def assert_refused_alike(message, *args):
    """Every rank ends with 2, and rank 0 alone says why, in one line."""
    code, out, err = run("links", *args)
    assert (code, out) == (2, "")
    if dist.get_rank() == 0:
        assert re.search(message, err) and err.count("\n") == 1, err
    else:
        assert not err
    # Nobody is left in a collective.
    assert comm.gather_objects(code, group=None) == [2] * dist.get_world_size()


class TestLinks(DistributedTest):
    world_size = [2, 4]
    thorough_on = (2, )

    @pytest.mark.parametrize("num_nodes", [1, 2])
    def test_they_are_measured_between_nodes_and_inside_and_plans_read_them(self, num_nodes, class_tmpdir, short,
                                                                            monkeypatch):
        size = dist.get_world_size()
        per_node = size // num_nodes
        pretend(monkeypatch, per_node)
        folder = class_tmpdir / f"{size} ranks, {per_node} a node"
        out = folder / "links.json"
        like = [] if 1 < per_node < size else ["--like", "pcie-ethernet"]
        code, said, err = run("links", out, *like)
        assert (code, err) == (0, "")
        assert comm.gather_objects(bool(said), group=None) == [True] + [False] * (size - 1)
        assert os.listdir(folder) == ["links.json"]
        dist.barrier()
        written = json.loads(out.read_text())
        assert set(written) == set(Links.keys())
        links = find_links(str(out))
        assert links.ranks_per_node == per_node and links.on_host is True
        assert 1 <= links.rails <= max(per_node, LINKS["pcie-ethernet"].rails * (per_node == size))
        # Of processes on one machine: between a megabyte a second and what memory does, a microsecond and a second.
        for key in ("inside_gb_s", "between_gb_s", "memory_gb_s"):
            assert 1e-3 < written[key] < 1e3, key
        for key in ("inside_us", "between_us", "peer_us"):
            assert 0 <= written[key] < 1e6, key
        assert 1e-5 < links.tflops < 1e3
        if dist.get_rank() == 0:
            assert re.match(rf"{size // per_node} x {per_node} ranks, cpu, Newton-Schulz in (float32|bfloat16)\n", said)
            assert said.endswith(f"written to {out}\n")
            for key in Links.keys():
                assert re.search(rf"^{key} ", said, re.MULTILINE)
            not_measured = set(re.findall(r"^(\w+) .* not measured, as --like pcie-ethernet has it$", said, re.M))
            assert not_measured == ({"inside_gb_s", "inside_us"} if per_node == 1 else
                                    {"between_gb_s", "between_us", "rails"} if per_node == size else set())
            (folder / "ds.json").write_text(json.dumps(CONFIG))
            plan = DryRun.of("gpt2-124m", folder / "ds.json", [8], links=str(out))
            assert plan.predictions[0].links == links and plan.predictions[0].total > 0

    @pytest.mark.world_size(4)
    def test_the_ranks_that_send_are_measured(self, short, monkeypatch):
        """Each series is between the ranks that it says, and those that it does not name are silent."""
        sent, now, all_to_all, timing = set(), [], comm._all_to_all, link_timing._timing

        def sending(out, given, received, sent_to, group):
            sent.update((where, tuple(comm.ranks_of(group))) for where in now)
            return all_to_all(out, given, received, sent_to, group)

        def timed(clock, kind, where, *args, **kwargs):
            now.append(where)
            found = timing(clock, kind, where, *args, **kwargs)
            now.pop()
            return found

        monkeypatch.setattr(comm, "_all_to_all", sending)
        monkeypatch.setattr(link_timing, "_timing", timed)
        times = link_timing.measure([0, 0, 1, 1], device())
        rank = dist.get_rank()
        found = {where: {ranks for each, ranks in sent if each == where} for where, _ in sent}
        inside, across = {0: (0, 1), 1: (2, 3)}[rank // 2], {0: (0, 2), 1: (1, 3)}[rank % 2]
        alone = {"alone": {across}} if rank % 2 == 0 else {}
        assert found == {"inside": {inside}, **alone, "together": {across}, "everywhere": {(0, 1, 2, 3)}}
        assert {(t.where, t.size) for t in times.timings} == {("inside", 2), ("alone", 2), ("together", 2),
                                                              ("everywhere", 4)}
        everyone = comm.gather_objects(times, group=None)
        assert everyone == [times] * 4, "all ranks have the same numbers"

    def test_an_error_is_told_once_and_ends_all_ranks(self, class_tmpdir, short, monkeypatch):
        size = dist.get_world_size()
        folder = class_tmpdir / f"refused on {size}"
        if dist.get_rank() == 0:
            folder.mkdir()
            (folder / "file").write_text("mine")
        dist.barrier()
        monkeypatch.setattr(link_timing, "measure", lambda *args: pytest.fail("measured for nothing"))
        assert_refused_alike("between_gb_s, between_us, rails cannot be measured on one node; .* with --like", "l.json")
        assert_refused_alike("--like must be one of auto, nvlink-ib, .* or a file, got 'ib'", "l.json", "--like", "ib")
        like = ("--like", "tcp")
        assert_refused_alike("file exists; name another place, or replace it with --overwrite", folder / "file", *like)
        assert_refused_alike("is a folder; name a file", folder, *like, "--overwrite")
        assert_refused_alike(r"l.json cannot be written: .*file'", folder / "file" / "l.json", *like)
        pretend(monkeypatch, 1)
        assert_refused_alike("inside_gb_s, inside_us cannot be measured on nodes of one rank", "l.json")
        if size == 4:
            pretend(monkeypatch, 2)
            assert_refused_alike("--like tcp is for what cannot be measured, and 2 nodes of 2 ranks have all", "l.json",
                                 *like)
            pretend(monkeypatch, 3)
            assert_refused_alike("the nodes have 3, 1 ranks, .* start as many on each", "l.json")
        assert (folder / "file").read_text() == "mine" and os.listdir(folder) == ["file"]

    @pytest.mark.world_size(2)
    def test_a_disk_that_fails_at_the_end_leaves_what_was_there(self, class_tmpdir, short, monkeypatch):
        out = class_tmpdir / "links.json"
        if dist.get_rank() == 0:
            out.write_text("before")

            def fails(path, text):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(measure_links, "point", fails)
        dist.barrier()
        assert_refused_alike("links.json cannot be written: .*No space left", out, "--like", "tcp", "--overwrite")
        assert out.read_text() == "before"
        monkeypatch.undo()
        assert run("links", out, "--like", "tcp", "--overwrite")[0] == 0
        assert find_links(str(out)).between_gb_s == LINKS["tcp"].between_gb_s


SCRIPT = """
    import sys

    import deepspeed

    from ds_layerwise import cli
    from ds_layerwise.tools.links import link_timing

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    link_timing._LONGEST_ON_HOST = 2**24
    code = cli.main()
    open(f"came back with {code}", "w").close()
    sys.exit(code)
"""


@pytest.mark.parametrize("code, arguments", [(0, ["--like", "tcp"]), (2, [])])
def test_deepspeeds_launcher_starts_it_and_hears_how_it_ends(code, arguments, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    world = "eyJsb2NhbGhvc3QiOiBbMCwgMV19"  # {"localhost": [0, 1]}
    done = subprocess.run(
        [sys.executable, "-m", launch.__name__, f"--world_info={world}", "--node_rank=0", "--master_addr=127.0.0.1",
         f"--master_port={free_port()}", "script.py", "links", "links.json", *arguments], cwd=tmp_path, timeout=240,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert bool(done.returncode) == bool(code), done.stdout + done.stderr
    assert (tmp_path / "links.json").exists() == (code == 0)
    if code:
        assert done.stderr.count("ds-layerwise: between_gb_s, between_us, rails cannot be measured on one node") == 1
        assert f"exits with return code = {code}" in done.stdout + done.stderr
    else:
        assert "written to links.json" in done.stdout
    # Ended by leave(), before the interpreter takes anything apart.
    assert "terminate called" not in done.stderr and not list(tmp_path.glob("came back*"))
