# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real SGLang serves as declared."""

from __future__ import annotations

import json

from look import Machine, get
from testinfra.host import Host

testinfra_hosts = ["lab://lab_sglang"]


def test_it_generates(host: Host) -> None:
    assert host.service("cleanslate-main").is_running
    question = {"text": "def main():", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    status, body = get(host, 30000, "/generate", question)
    assert (status, json.loads(body)["meta_info"]["completion_tokens"]) == (200, 8)


def test_it_is_the_real_one(host: Host) -> None:
    information = json.loads(get(host, 30000, "/server_info")[1])
    assert information["version"] == "0.5.23"
    assert information["device"] == "cpu"
    assert information["load_format"] == "dummy"


def test_its_processes_have_the_variables_and_the_gpu(machine: Machine) -> None:
    processes = machine.instance("main")
    titles = {process.title for process in processes}
    assert {"sglang::scheduler", "sglang::detokenizer"} <= titles
    for process in processes:
        assert process.environment["NCCL_BUFFSIZE"] == "8388608"
        assert process.environment["NCCL_ALGO"] == "allreduce:ring"
    assert {process.pid for process in machine.holders(machine.gpus[0])} <= {process.pid for process in processes}
    assert [process for process in machine.holders(machine.gpus[0]) if process.title == "sglang::scheduler"]
