"""The Ray engine on a real cluster on loopback: two node processes, one of them killed in the middle."""

import json
import os

import pytest
from toy_recipes import toy

from utils.cookbook.sweep_points import points_of, read_done, write_done, write_rows
from utils.cookbook.sweep_spec import load_spec

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray>=2.40,<3'")

# Who ran a point, and that it started: a point that is done must not start again.
STARTS = """\
import os
with open("starts", "a") as file:
    print(seed, file=file)
"""
LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the machine's outer address
# A cluster notices a lost node after 20 s by default.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def cluster():
    """Two node processes of one CPU each; the first test kills the second of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("COOKBOOK_DEVICE", "cpu")
        from ray.cluster_utils import Cluster

        made = Cluster()
        small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "node_ip_address": LOOPBACK}
        try:
            made.add_node(**small, _system_config=QUICK, include_dashboard=False)
            made.other = made.add_node(**small)
        except Exception as error:  # a node that is not up after 15 s gives up, which a busy machine brings about
            made.shutdown()
            pytest.skip(f"Ray does not start here: {' '.join(str(error).split())}")
        yield made
        ray.shutdown()
        made.shutdown()


class Watching:
    """Progress that calls `then` when so many points are over."""

    def __init__(self, after: int, then):
        self.after, self.then, self.lines, self.over = after, then, [], 0

    def start(self, point):
        pass

    def line(self, text):
        self.lines.append(text)

    def end(self, point, outcome):
        self.over += 1
        if self.over == self.after:
            self.then()


def test_a_killed_node_costs_no_point_and_no_row_comes_twice(tmp_path, cluster):
    from utils.cookbook.sweep_ray import connect

    toy(tmp_path / "nb", "01_toy", ("", STARTS))
    (tmp_path / "s.yaml").write_text("recipe: 01_toy\ngrid: {seed: [0,1,2,3,4,5,6,7,8,9,10,11]}\ntime_limit: 120\n")
    spec = load_spec(str(tmp_path / "s.yaml"), lambda name: tmp_path / "nb" / f"{name}.ipynb")
    out = tmp_path / "out"
    limits = {"retries": 0, "time_limit": spec.time_limit}

    def kill():
        cluster.remove_node(cluster.other, allow_graceful=False)

    with connect(cluster.address, spec) as connected:
        points = points_of(spec, out, connected.identity)
        assert len(connected.nodes) == 2 and connected.check(points) == 2
        progress = Watching(4, kill)
        for point, outcome, tries in connected.run(points, progress, **limits):
            assert (outcome.state, outcome.why) == ("done", "")
            write_done(point, outcome, tries)
            progress.end(point, outcome)
        assert len(connected.nodes) == 1
    path, count = write_rows(out, points)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert count == 12 and sorted(row["speedup"] for row in rows) == [2.0 + seed for seed in range(12)]
    assert len({row["point"] for row in rows}) == 12
    # The points of a Ray cluster are those of one machine: the same keys, files and resume.
    from utils.cookbook.sweep_points import here

    local = points_of(spec, out, here(spec.recipe))
    assert [point.key for point in local] == [point.key for point in points] and all(map(read_done, local))
    assert os.path.exists(points[0].folder / "01_toy.ipynb")
    starts = (tmp_path / "nb" / "starts").read_text().split()
    assert set(starts) == {str(seed) for seed in range(12)} and len(starts) <= 13  # one was under way on the lost node


def test_a_failing_point_and_a_node_of_another_code(tmp_path, cluster, monkeypatch):
    from utils.cookbook.sweep_ray import connect

    toy(tmp_path / "nb", "01_toy", ("check", "assert seed, 'seed is nought'"))
    (tmp_path / "s.yaml").write_text("recipe: 01_toy\ngrid: {seed: [0, 1]}\n")
    spec = load_spec(str(tmp_path / "s.yaml"), lambda name: tmp_path / "nb" / f"{name}.ipynb")
    with connect(cluster.address, spec) as connected:
        points = points_of(spec, tmp_path / "out", connected.identity)
        ended = connected.run(points, Watching(0, None), retries=1, time_limit=60)
        found = {point.label: (outcome.state, outcome.where, outcome.why, tries) for point, outcome, tries in ended}
        assert found["seed=0"] == ("failed", "cell [2], tag `check`", "AssertionError: seed is nought", 2)
        assert found["seed=1"][0] == "done"
        log = (points[0].folder / "log.txt").read_text()
        assert "try 2 of 2" in log and "AssertionError: seed is nought" in log
        # A device that no node has.
        monkeypatch.setattr(connected, "wants_gpu", lambda point: True)
        with pytest.raises(ValueError, match="no node of the Ray cluster has a GPU"):
            connected.check(points)
    (tmp_path / "nb" / "01_toy.ipynb").unlink()
    refused = pytest.raises(ValueError, match=r"has no node that can run 01_toy: node .* not there")
    with refused, connect(cluster.address, spec):
        pass


def test_a_point_has_its_gpu_or_its_whole_node_to_itself(monkeypatch):
    from types import SimpleNamespace

    from utils.cookbook.sweep_ray import Cluster, Node

    monkeypatch.delenv("COOKBOOK_DEVICE", raising=False)
    cluster = object.__new__(Cluster)
    cluster.nodes = {"a": Node("a", "a", gpus=2, cpus=8), "b": Node("b", "b", gpus=0, cpus=8)}
    point = {name: SimpleNamespace(parameters={"device": name}, label=name) for name in ("auto", "cuda", "cpu")}
    assert [cluster.wants_gpu(point[name]) for name in ("auto", "cuda", "cpu")] == [True, True, False]
    assert cluster.check([point["auto"]]) == 2 and cluster.check([point["cpu"]]) == 2
    a, b = cluster.nodes.values()
    assert cluster.free_node(point["cuda"]) is a and cluster.free_node(point["cpu"]) is a
    a.running = 1  # one of two GPUs
    assert cluster.free_node(point["cuda"]) is a and cluster.free_node(point["cpu"]) is b
    a.running = 2
    assert cluster.free_node(point["cuda"]) is None
    a.running, a.whole = 1, True  # a CPU point
    assert cluster.free_node(point["cuda"]) is None and cluster.free_node(point["cpu"]) is b
    b.running = 1
    assert cluster.free_node(point["cpu"]) is None
    monkeypatch.setenv("COOKBOOK_DEVICE", "cpu")
    assert not cluster.wants_gpu(point["auto"])
    with pytest.raises(ValueError, match="device 'cuda:1': with --engine ray a point sees one GPU"):
        cluster.check([SimpleNamespace(parameters={"device": "cuda:1"}, label="")])


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there (Connection refused)"),
        ("127.0.0.1:99999", "no Ray cluster answers there"),
        ("ray://head", "expected HOST:PORT, such as"),
        ("6379", "expected HOST:PORT, such as"),
    ],
)
def test_no_cluster_at_the_address_is_one_line(address, said):
    from utils.cookbook.sweep_ray import reachable

    with pytest.raises(ValueError) as caught:
        reachable(address)
    assert str(caught.value).startswith(f"--address {address}: {said}")
