# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Logs of the real SGLang (0.5.17 on H200s, 0.5.23 on a CPU), and what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import logs

LOGS = Path(__file__).parent / "logs"


def lines(name):
    """The lines of a log, in which a carriage return is written as a backslash and an r."""
    return logs.split_lines((LOGS / name).read_text(encoding="utf-8").replace("\\r", "\r"))


def test_the_whole_start_of_a_real_server_is_told_once_and_in_order():
    state = {}
    told = logs.progress(lines("tp2_eagle3.log"), state)
    assert told[0].startswith("SGLang has read its arguments")
    for text in (
        "weights are being loaded (138.22 GB free on the GPU)",
        "weights of LlamaForCausalLM loaded",
        "weights of LlamaForCausalLMEagle3 loaded",
        "target verify CUDA graphs captured in 2.73 s",
        "draft decode CUDA graphs captured in 7.60 s",
        "draft extend CUDA graphs captured in 2.81 s",
        "SGLang says that it is ready",
    ):
        assert sum(text in line for line in told) == 1, text
    assert state["phase"] == "fired_up"
    assert logs.progress(lines("tp2_eagle3.log")[-3:], state) == []


def test_reading_line_by_line_tells_the_same_phases():
    state = {}
    told = [text for line in lines("tp2_eagle3.log") for text in logs.progress([line], state)]
    assert [text for text in told if "captured in" in text] == [
        "target verify CUDA graphs captured in 2.73 s",
        "draft decode CUDA graphs captured in 7.60 s",
        "draft extend CUDA graphs captured in 2.81 s",
    ]
    assert sum("graphs  [" in text and "100%" in text for text in told) == 3


def test_lines_of_0_5_23():
    told = logs.progress(
        ["[2026-11-29 19:06:35] server_args={'model_path': '/m', 'api_key': 'hush'}", "[x] Init parallel begin."], {}
    )
    assert [line.split(";")[0] for line in told] == [
        "SGLang has read its arguments",
        "the workers connect to each other",
    ]
    assert "hush" not in logs.clean("server_args={'model_path': '/m', 'api_key': 'hush', 'x': 1}")


def test_a_bar_within_one_look_is_told_once():
    many = [
        "Capturing batches (bs=8 avail_mem=97.14 GB): %d%%|x| %d/20 [00:00<00:05,  3.63it/s]" % (n * 5, n)
        for n in range(21)
    ]
    assert logs.progress(many, {}) == ["graphs  [####################] 100% 20/20"]


def test_lines_end_at_carriage_returns_too():
    assert logs.split_lines("a\rb\n\r\nc") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "code", "cause", "said"),
    [
        ("fail_port.log", None, "port", "sglang_server_port"),
        ("fail_mem.log", -9, "memory", "sglang_server_mem_fraction_static"),
        ("fail_baddraft.log", 1, "missing_file", "draft_model_path"),
        ("fail_badspec.log", 1, "error", "AssertionError"),
    ],
)
def test_real_failures_are_explained(name, code, cause, said):
    found = logs.diagnose(lines(name), code)
    assert found.cause == cause
    assert said in found.msg
    assert found.lines
    if code == -9:
        assert "137" in found.msg


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out_of_memory"),
        ("RuntimeError: NCCL error in: ncclInvalidUsage", "nccl"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "shared_memory"),
        ("launch_server.py: error: argument --speculative-num-steps: invalid int value: '3x'", "arguments"),
        ("ModuleNotFoundError: No module named 'torch'", "import"),
        ("ValueError: The memory capacity is unbalanced.", "unbalanced_memory"),
        ("Exception: Capture cuda graph failed: no kernel", "graphs"),
        ("RuntimeError: something nobody has seen", "error"),
    ],
)
def test_known_errors(line, cause):
    assert logs.diagnose(["loading", line, "the end"], 1).cause == cause


def test_killed_without_a_word():
    found = logs.diagnose(["Load weight begin."], -9)
    assert found.cause == "killed"
    assert "137" in found.msg


def test_a_log_that_is_empty():
    assert "wrote nothing" in logs.diagnose([], 3).msg


def test_no_key_in_a_diagnosis():
    first = lines("tp2_eagle3.log")[0]
    assert "k-secret-of-a-test" in first
    assert "k-secret-of-a-test" not in logs.clean(first[-200:])
    assert "hush" not in str(logs.diagnose(["ValueError: key hush is wrong"], 1, ["hush"]))


def test_terminal_tricks_do_not_get_through():
    assert logs.clean("\x1b[2J\x1b[31mred\x07") == "red\\x07"


def test_activity():
    seen = logs.activity(lines("tp2_eagle3.log")[-8:])
    assert seen.batches > 0
    assert not seen.occupied
    assert logs.activity(["[x TP0] Capture draft extend CUDA graph begin."]).occupied


class TestFile:
    def test_reads_on_and_keeps_half_lines(self, tmp_path):
        log = logs.FileLog(str(tmp_path / "server.log"))
        assert log.read({}) == ([], {})
        path = tmp_path / "server.log"
        path.write_text("one\ntwo 10%\rtwo 20%")
        found, cursor = log.read({})
        assert found == ["one", "two 10%"]
        with path.open("a") as handle:
            handle.write("\rthree\n")
        found, cursor = log.read(cursor)
        assert found == ["two 20%", "three"]
        assert log.read(cursor)[0] == []

    def test_starts_again_after_rotation(self, tmp_path):
        path = tmp_path / "server.log"
        path.write_text("a long line of the past\n")
        log = logs.FileLog(str(path))
        _found, cursor = log.read({})
        path.write_text("new\n")
        assert log.read(cursor)[0] == ["new"]


class Journal:
    """Stands for journalctl."""

    def __init__(self, out):
        self.out = out
        self.asked = []

    def run(self, *words, timeout=60.0):
        self.asked.append(words)
        return self.out


class TestJournal:
    def test_text_bytes_and_nothing(self):
        journal = Journal(
            '{"MESSAGE":"plain","__CURSOR":"c1"}\n'
            '{"MESSAGE":[76,111,97,100,27,91,75,13,195,188],"__CURSOR":"c2"}\n'
            '{"MESSAGE":null,"__CURSOR":"c3"}\nnot json\n'
        )
        log = logs.JournalLog("cleanslate-main.service", "abc", journal)
        found, cursor = log.read({})
        assert found == ["plain", "Load\x1b[K", "ü"]
        assert cursor == {"journal": "c3"}
        assert "_SYSTEMD_INVOCATION_ID=abc" in journal.asked[0]
        log.read(cursor)
        assert "--after-cursor=c3" in journal.asked[1]

    def test_a_cursor_that_was_vacuumed_away(self):
        class Vacuumed(Journal):
            def run(self, *words, timeout=60.0):
                if any(word.startswith("--after-cursor") for word in words):
                    raise CleanslateError("journalctl failed (exit 1): Failed to seek to cursor")
                return super().run(*words)

        log = logs.JournalLog("cleanslate-main.service", "abc", Vacuumed('{"MESSAGE":"plain","__CURSOR":"c9"}\n'))
        assert log.read({"journal": "c1"}) == (["plain"], {"journal": "c9"})

    def test_a_journal_that_cannot_be_read_at_all(self):
        class Broken(Journal):
            def run(self, *words, timeout=60.0):
                raise CleanslateError("journalctl failed (exit 1): no journal")

        with pytest.raises(CleanslateError, match="no journal"):
            logs.JournalLog("cleanslate-main.service", "abc", Broken("")).read({})
