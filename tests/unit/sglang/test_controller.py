# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's side: the list of servers completed, the id of a run, the wait in windows; and leases of a plan."""

from __future__ import annotations

import multiprocessing
import types

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.cleanslate.inference.plugins.action import server_ready
from ansible_collections.cleanslate.inference.plugins.filter.server_instances import server_instances
from ansible_collections.cleanslate.inference.plugins.lookup import run_id
from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import run
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.declaration import Declaration
from ansible_collections.cleanslate.inference.plugins.module_utils.state.lease import Lease

FLAT = {
    "name": "main",
    "model_path": "/srv/m",
    "port": 30000,
    "user": None,
    "nccl": {"ALGO": "Ring", "DEBUG": "INFO"},
    "nccl_host": {"SOCKET_IFNAME": "eth0"},
    "environment": {"X": "1"},
    "args": {"page_size": 1},
    "speculative": {"algorithm": "EAGLE3", "num_steps": 3},
}


class TestInstances:
    def test_the_flat_variables_are_one_server(self):
        (server,) = server_instances([], FLAT)
        assert server["name"] == "main"
        assert server["declaration"]["model_path"] == "/srv/m"
        assert "user" not in server["declaration"]

    def test_entries_add_to_the_flat_ones(self):
        (server,) = server_instances([{"name": "b", "nccl": {"ALGO": "Tree", "DEBUG": None}, "args": {"x": 1}}], FLAT)
        assert server["declaration"]["nccl"] == {"ALGO": "Tree"}
        assert server["declaration"]["args"] == {"page_size": 1, "x": 1}
        assert server["declaration"]["environment"] == {"X": "1"}

    def test_null_in_nccl_host_is_kept_because_it_means_something(self):
        (server,) = server_instances([{"name": "b", "nccl_host": {"ALGO": None}}], FLAT)
        assert server["declaration"]["nccl_host"] == {"SOCKET_IFNAME": "eth0", "ALGO": None}

    def test_speculation_is_replaced_as_a_whole(self):
        (server,) = server_instances([{"name": "b", "speculative": {"algorithm": "NGRAM"}}], FLAT)
        assert server["declaration"]["speculative"] == {"algorithm": "NGRAM"}

    def test_nothing_of_one_entry_reaches_another(self):
        first, second = server_instances(
            [{"name": "a", "gpus": [0], "nccl": {"NTHREADS": 64}}, {"name": "b", "gpus": [1], "port": 30001}], FLAT
        )
        assert "NTHREADS" in first["declaration"]["nccl"]
        assert "NTHREADS" not in second["declaration"]["nccl"]

    @pytest.mark.parametrize(
        ("entries", "said"),
        [
            ([{"name": "a", "tpsize": 2}], "Did you mean tp_size"),
            ([{"name": "a", "page_size": 2}], "go into args"),
            ([{"name": "a", "gpus": [0]}, {"name": "a", "gpus": [1], "port": 1}], "name a is declared twice"),
            ([{"name": "a", "gpus": [0]}, {"name": "b", "gpus": [1]}], "port 30000 is declared twice"),
            ([{"name": "a", "gpus": [0]}, {"name": "b", "gpus": [1], "port": "30000"}], "port 30000 is declared twice"),
            ([{"name": "a", "gpus": [0, 1]}, {"name": "b", "gpus": ["1"], "port": 1}], "GPU 1 is declared twice"),
            ([{"name": "a", "gpus": ["GPU-AB"]}, {"name": "b", "gpus": ["gpu-ab"], "port": 1}], "GPU gpu-ab is"),
            ([{"name": "a", "gpus": [0]}, {"name": "b", "port": 1}], "missing in b"),
            ([{"name": "a", "gpus": [0]}, {"name": "b", "gpus": None, "port": 1}], "missing in b"),
            ("main", "a list"),
        ],
    )
    def test_what_is_wrong(self, entries, said):
        with pytest.raises(AnsibleFilterError, match=said):
            server_instances(entries, FLAT)

    def test_an_entry_needs_a_name(self):
        with pytest.raises(AnsibleFilterError, match="no name"):
            server_instances([{"port": 1}], {"model_path": "/m"})


class TestRunId:
    def test_it_is_the_same_in_a_worker(self):
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        worker = context.Process(target=lambda: there.send(run_id.run_id()))
        worker.start()
        assert here.recv() == run_id.run_id()
        worker.join()

    def test_it_names_the_process_and_when_it_started(self):
        who, _at, rest = run_id.run_id().partition("@")
        assert who
        assert rest.rpartition(":")[2] == "%d-%s" % (run_id.main_pid(), run_id.start_of(run_id.main_pid()))


class Waiting(server_ready.ActionModule):
    """The action without Ansible around it."""

    def __init__(self, answers, check_mode=False):
        self._task = types.SimpleNamespace(args={"instance": "main"}, check_mode=check_mode, async_val=0)
        self._supports_check_mode = self._supports_async = True
        self.answers = list(answers)
        self.asked = []

    def _execute_module(self, module_args=None, task_vars=None, **_):
        self.asked.append(dict(module_args))
        return self.answers.pop(0)


def waiting(elapsed, **more):
    return {
        "state": "waiting",
        "elapsed": elapsed,
        "timeout": 60.0,
        "cursor": {"n": elapsed},
        "events": ["at %s" % elapsed],
        **more,
    }


@pytest.fixture
def shown(monkeypatch):
    lines = []
    monkeypatch.setattr(server_ready, "say", lambda host, told: lines.extend(told))
    monkeypatch.setattr(server_ready.ActionBase, "run", lambda self, tmp, task_vars: {})
    return lines


class TestReady:
    def test_it_asks_on_from_where_the_last_call_ended(self, shown):
        action = Waiting([waiting(10), waiting(20), {"state": "ready", "elapsed": 25, "events": ["done"]}])
        result = action.run(task_vars={"inventory_hostname": "n"})
        assert [call.get("cursor") for call in action.asked] == [None, {"n": 10}, {"n": 20}]
        assert shown == result["events"] == ["at 10", "at 20", "done"]
        assert not result.get("failed")

    def test_it_gives_up_at_the_limit(self, shown):
        result = Waiting([waiting(30), waiting(61, phase="weights", last="refused", instance="main")]).run()
        assert result["failed"]
        assert result["state"] == "timeout"
        assert "the last phase was weights (refused)" in result["msg"]

    def test_a_failure_ends_it_at_once(self, shown):
        action = Waiting([{"state": "failed", "failed": True, "msg": "out of memory"}])
        assert action.run()["msg"] == "out of memory"

    def test_a_node_that_is_lost_ends_it(self, shown):
        assert Waiting([{"unreachable": True, "msg": "gone"}]).run()["unreachable"]

    def test_progress_can_be_off(self, shown):
        Waiting([{"state": "ready", "events": ["done"]}]).run(task_vars={"cleanslate_progress": "off"})
        assert shown == []

    def test_check_mode_asks_once(self, shown):
        action = Waiting([waiting(1)], check_mode=True)
        assert not action.run().get("failed")
        assert len(action.asked) == 1


class Planned:
    """Stands for a plan with a given verdict."""

    verdict = "reset"
    changes = ()

    def __init__(self, *args, **kwargs):
        pass

    def run(self):
        if self.verdict == "error":
            raise CleanslateError("something is wrong")
        return self

    @property
    def converged(self):
        return self.verdict == "converged"

    def as_dict(self):
        return {"verdict": self.verdict}


class TestLease:
    @pytest.fixture
    def plan(self, tmp_path, monkeypatch):
        monkeypatch.setattr(run, "Planner", Planned)
        monkeypatch.setattr(run, "_survey", lambda params: None)
        run_dir = str(tmp_path / "run")
        params = {"run_dir": run_dir, "state_dir": str(tmp_path), "lock_timeout": 0.0, "teardown": {}, "reset": "auto"}
        params["assume_ended"] = []

        def planned(verdict, lease="run-1", check_mode=False, release=False):
            monkeypatch.setattr(Planned, "verdict", verdict)
            declaration = Declaration.from_params("main", {"model_path": "/m"})
            return run.plan_server(declaration, dict(params, lease=lease, release_lease=release), check_mode)

        planned.lease = Lease(run_dir, "run-1")
        return planned

    def test_a_reset_keeps_it(self, plan):
        plan("reset")
        assert plan.lease.current().run == "run-1"

    @pytest.mark.parametrize("verdict", ["blocked", "unknown"])
    def test_a_failure_drops_it(self, plan, verdict):
        plan(verdict)
        assert plan.lease.current() is None

    def test_a_converged_server_keeps_it_for_the_next_one_unless_told_otherwise(self, plan):
        plan("reset")
        plan("converged")
        assert plan.lease.current().run == "run-1"
        plan("converged", release=True)
        assert plan.lease.current() is None

    def test_a_reset_keeps_it_whatever_it_was_told(self, plan):
        plan("reset", release=True)
        assert plan.lease.current().run == "run-1"

    def test_an_error_drops_it(self, plan):
        with pytest.raises(CleanslateError):
            plan("error")
        assert plan.lease.current() is None

    def test_check_mode_takes_none(self, plan):
        plan("reset", check_mode=True)
        assert plan.lease.current() is None

    @pytest.mark.parametrize(("lease", "check_mode"), [("run-2", False), (None, False), ("run-2", True)])
    def test_another_runs_lease_is_in_the_way(self, plan, lease, check_mode):
        plan("reset")
        with pytest.raises(CleanslateError, match="run-1 is at work on this node"):
            plan("reset", lease=lease, check_mode=check_mode)
        assert plan.lease.current().run == "run-1"
