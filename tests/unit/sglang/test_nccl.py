# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NCCL's grammar, row by row: what is refused, what is let through, and the words that help."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import nccl

GOOD = [
    ("ALGO", "Ring"),
    ("ALGO", "ring,tree"),
    ("ALGO", "allreduce:tree"),
    ("ALGO", "allreduce:tree,ring;allgather:ring"),
    ("ALGO", "^tree"),
    ("ALGO", "^nvls,nvlstree"),
    ("ALGO", "ring;allreduce:tree"),
    ("PROTO", "LL"),
    ("PROTO", "ll,simple"),
    ("PROTO", "^LL"),
    ("PROTO", "^LL128"),
    ("PROTO", "LL,LL128,Simple"),
    ("BUFFSIZE", 4194304),
    ("BUFFSIZE", "65536"),
    ("BUFFSIZE", "0x400000"),
    ("NTHREADS", 512),
    ("MIN_NCHANNELS", 1),
    ("MAX_NCHANNELS", 64),
    ("P2P_LEVEL", "SYS"),
    ("P2P_LEVEL", "5"),
    ("P2P_DISABLE", 1),
    ("P2P_DISABLE", True),
    ("NET_GDR_LEVEL", "PHB"),
    ("DEBUG", "info"),
    ("SOCKET_IFNAME", "^docker,lo"),
    ("SOCKET_IFNAME", "=bond0"),
    ("SOCKET_IFNAME", ["eth0", "eth1"]),
    ("IB_HCA", "mlx5_0:1,mlx5_1"),
    ("CUMEM_ENABLE", -2),
    ("CROSS_NIC", 2),
]
BAD = [
    ("ALGO", "Trees", "knows no trees"),
    ("ALGO", "Tree", "allreduce:tree"),
    ("ALGO", "NVLS", "broadcast"),
    ("ALGO", "everything:ring", "knows no everything"),
    ("ALGO", "ring;tree", "first list"),
    ("ALGO", "^ring", "broadcast"),
    ("PROTO", "LL64", "knows no ll64"),
    ("PROTO", "LL128", "corrupts data"),
    ("PROTO", "LL128,Simple", "corrupts data"),
    ("PROTO", "allreduce:ll128", "corrupts data"),
    ("BUFFSIZE", "4M", "4 bytes to NCCL. Write 4194304"),
    ("BUFFSIZE", "512KiB", "Write 524288"),
    ("BUFFSIZE", 4096, "at least 65536"),
    ("BUFFSIZE", 5000000, "power of two"),
    ("BUFFSIZE", "abc", "read by NCCL as 0"),
    ("NTHREADS", 100, "multiple of 32"),
    ("NTHREADS", 1024, "outside 64 to 512"),
    ("MIN_NCHANNELS", 0, "outside 1 to 64"),
    ("MAX_NCHANNELS", "010", "octal to NCCL (8)"),
    ("P2P_LEVEL", "sys", "Write SYS"),
    ("P2P_LEVEL", "NVLINK", "ignored by NCCL"),
    ("P2P_LEVEL", "6", "ignored by NCCL"),
    ("P2P_DISABLE", "yes", "only exactly 1"),
    ("DEBUG", "verbose", "NCCL knows VERSION"),
    ("SOCKET_IFNAME", "/dev/eth0", "no list of interface names"),
    ("CROSS_NIC", 3, "outside 0 to 2"),
    ("IB_TIMEOUT", "20ms", "read by NCCL as 20"),
    ("IB_HCA", "", "is empty"),
    ("BUFFSIZE", 1.5, "wants a number"),
    ("ALGO", "Ring\nLD_PRELOAD=x", "wants a number"),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_good_values_pass(name, value):
    effective = nccl.merge({name: value}, {}, {})
    assert effective.errors == []
    assert list(effective.values) == ["NCCL_" + name]


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_bad_values_are_refused_with_the_variable_to_change(name, value, said):
    effective = nccl.merge({name: value}, {}, {})
    assert len(effective.errors) == 1
    assert said in effective.errors[0].msg
    assert effective.errors[0].variable == "sglang_server_nccl"


@pytest.mark.parametrize("name", ["algo", "ALGO", "NCCL_ALGO", "nccl_algo"])
def test_names_go_with_and_without_prefix(name):
    assert nccl.merge({name: "Ring"}, {}, {}).values == {"NCCL_ALGO": "Ring"}


def test_an_unknown_name_is_a_warning_with_the_nearest_one():
    effective = nccl.merge({"BUFSIZE": 4194304}, {}, {})
    assert effective.errors == []
    assert "NCCL_BUFFSIZE" in effective.warnings[0]


def test_a_name_of_the_past_is_a_warning():
    assert "not read" in nccl.merge({"TREE_THRESHOLD": 0}, {}, {}).warnings[0]


def test_the_host_adds_and_overrules_and_takes_away():
    effective = nccl.merge(
        {"ALGO": "Ring", "DEBUG": "INFO"}, {"SOCKET_IFNAME": "eth1", "NCCL_ALGO": "ring,tree", "DEBUG": None}, {}
    )
    assert effective.values == {"NCCL_ALGO": "ring,tree", "NCCL_SOCKET_IFNAME": "eth1"}
    assert effective.sources["NCCL_ALGO"] == "sglang_server_nccl_host"
    assert effective.errors == []


def test_twice_in_one_source_names_both_spellings():
    (error,) = nccl.merge({"ALGO": "Ring", "NCCL_ALGO": "Ring"}, {}, {}).errors
    assert "ALGO and as NCCL_ALGO" in error.msg


def test_in_nccl_and_in_environment_names_both_places():
    (error,) = nccl.merge({"ALGO": "Ring"}, {}, {"NCCL_ALGO": "Ring"}).errors
    assert "sglang_server_nccl and in sglang_server_environment" in error.msg


def test_a_variable_in_the_environment_is_checked_too():
    (error,) = nccl.merge({}, {}, {"NCCL_BUFFSIZE": "4M"}).errors
    assert error.variable == "sglang_server_environment"


def test_least_above_most_channels():
    (error,) = nccl.merge({"MIN_NCHANNELS": 8, "MAX_NCHANNELS": 4}, {}, {}).errors
    assert "above NCCL_MAX_NCHANNELS=4" in error.msg


def test_a_level_that_a_switch_makes_idle():
    (error,) = nccl.merge({"P2P_DISABLE": 1, "P2P_LEVEL": "SYS"}, {}, {}).errors
    assert "idle" in error.msg


@pytest.mark.parametrize(
    ("value", "gloo"),
    [("bond0", "bond0"), ("=eth0", "eth0"), ("^docker0", None), ("eth0,eth1", "eth0,eth1"), ("", None)],
)
def test_gloo_gets_the_interface_of_nccl(value, gloo):
    assert nccl.gloo_interface({"NCCL_SOCKET_IFNAME": value}) == gloo
