# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in server: its processes and what they hold, its way up and down, its faults and its litter."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LAB = Path(__file__).resolve().parents[2] / "lab"
EAGLE = (
    "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --speculative-draft-model-path"
)
PATIENCE = 30


class Server:
    """One stand-in server in folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dev, self.shm, self.tmp, self.log_file = (folder / name for name in ("dev", "shm", "tmp", "log"))
        for made in (self.dev, self.shm, self.tmp):
            made.mkdir(parents=True)
        for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
            (self.dev / name).write_bytes(bytes(4096))
        for name in ("target", "draft"):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.seen: list[int] = []

    def sibling(self, name: str) -> Server:
        """Another node of the same instance."""
        return Server(self.folder.parent / name)

    def start(self, line: str = "", **environment: str) -> None:
        """Start in a session of its own; nothing is waited for."""
        inherited = {k: v for k, v in os.environ.items() if not re.match("CUDA_|FAKE_|NCCL_|SGLANG_|SPT_|STANDIN_", k)}
        own = {
            "PYTHONPATH": str(LAB / "standin"),
            "STANDIN_DEV_DIR": str(self.dev),
            "STANDIN_SHM_DIR": str(self.shm),
            "STANDIN_TMP_DIR": str(self.tmp),
            "STANDIN_SPEED": "20",
        }
        words = ["--model-path", str(self.folder / "target"), "--port", str(self.port), *line.split()]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *words],
                env={**inherited, **own, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self) -> str:
        return self.log_file.read_text().replace("\r", "\n")

    def until(self, true: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (value := true()):
            assert time.monotonic() < deadline, f"{what} did not come\n{self.log()[-3000:]}"
            time.sleep(0.01)
        return value

    def until_logged(self, text: str) -> None:
        self.until(lambda: text in self.log(), text)

    def up(self) -> None:
        self.until_logged("The server is fired up and ready to roll!")

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def ask(self, path: str, body: Any = None, timeout: float = 20, key: str | None = None) -> tuple[int, Any]:
        """Status and content; status 0 when refused."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise TimeoutError from error
            return 0, None
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def generate(self, new: int = 8, **more: Any) -> tuple[int, Any]:
        return self.ask("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": new}}, **more)

    def members(self) -> dict[int, str]:
        """Live processes of the server's session, by pid: their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, _, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(session) == self.process.pid and state not in "ZX":
                found[int(entry.name)] = words
        return found

    def titled(self, title: str) -> int:
        (pid,) = [pid for pid, words in self.members().items() if words == title]
        return pid

    def gone(self) -> None:
        self.until(lambda: not self.members(), "the end of all processes")

    def left(self) -> list[str]:
        return sorted(re.sub(r"[0-9a-f]{8,}|\d+", "N", path.name) for path in self.shm.iterdir())

    def end(self) -> None:
        for pid in [self.process.pid, *self.members()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "server")
    yield made
    made.end()


def environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def descriptors(pid: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        name = Path(os.readlink(entry)).name
        counts[name] = counts.get(name, 0) + 1
    return counts


def mapped(pid: int) -> dict[str, int]:
    names = re.findall(r"/(nvidia\d+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    return {name: names.count(name) for name in names}


# -- The whole life of the server of the demo --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """TP=3 with EAGLE-3 on GPUs 0-2 of four, fully up; asked for its health all the way.

    It begins wedged, so that the warm-up lasts until it was seen.
    """
    made = Server(tmp_path_factory.mktemp("eagle") / "server")
    (made.folder / "wedged").touch()
    uuids = ",".join(f"GPU-fa4e0000-0000-4000-8000-00000000000{minor}" for minor in range(3))
    made.start(
        f"--tp-size 3 --enable-metrics --api-key secret {EAGLE} {made.folder / 'draft'}",
        SPT_NOENV="1",
        CUDA_VISIBLE_DEVICES=uuids,
        NCCL_DEBUG="INFO",
        NCCL_ALGO="Ring",
        NCCL_BUFFSIZE="4M",
        NCCL_TYPO="1",
        STANDIN_WEDGE=str(made.folder / "wedged"),
    )
    while 200 not in made.seen:
        made.seen.append(made.ask("/health")[0])
        if 503 in made.seen:
            (made.folder / "wedged").unlink(missing_ok=True)
        assert made.process.poll() is None, made.log()
    yield made
    made.end()


def test_health_is_refused_then_503_then_200(eagle: Server) -> None:
    order = [status for i, status in enumerate(eagle.seen) if i == 0 or eagle.seen[i - 1] != status]
    assert order == [0, 503, 200]


def test_the_tree(eagle: Server) -> None:
    members = eagle.members()
    titles = sorted(words for words in members.values() if words.startswith("sglang::"))
    assert titles == ["sglang::detokenizer", *(f"sglang::scheduler_TP{rank}" for rank in range(3))]
    assert Path(f"/proc/{eagle.titled('sglang::scheduler_TP0')}/comm").read_text() == "sglang::schedul\n"
    pools = [words for words in members.values() if "/torch/_inductor/compile_worker/__main__.py" in words]
    assert len(pools) == 3 * (1 + 2)
    assert {int(re.search(r"--parent=(\d+)", words)[1]) for words in pools} == {  # type: ignore[index]
        eagle.titled(f"sglang::scheduler_TP{rank}") for rank in range(3)
    }
    tracker = [pid for pid, words in members.items() if "multiprocessing.resource_tracker" in words]
    assert len(tracker) == 1 and not any(name.startswith("nvidia") for name in descriptors(tracker[0]))
    assert len(members) == 1 + 1 + 1 + 3 + 9


def test_what_they_hold(eagle: Server) -> None:
    for pid in (eagle.process.pid, eagle.titled("sglang::detokenizer")):
        counts = descriptors(pid)
        assert [counts[f"nvidia{minor}"] for minor in range(4)] == [7, 7, 7, 3]
        assert (counts["nvidiactl"], counts["nvidia-uvm"]) == (2, 4)
        assert mapped(pid) == {"nvidia0": 2, "nvidia1": 2, "nvidia2": 2}
    scheduler = eagle.titled("sglang::scheduler_TP1")
    assert [descriptors(scheduler)[f"nvidia{minor}"] for minor in range(4)] == [7, 23, 7, 3]
    assert mapped(scheduler) == {"nvidia0": 2, "nvidia1": 3, "nvidia2": 2}
    for pid, words in eagle.members().items():
        if "compile_worker" in words:
            assert descriptors(pid)["nvidia3"] == 1 and mapped(pid) == {}


def test_nvml_lists_the_schedulers_only(eagle: Server, nvml) -> None:
    nvml.environment["FAKE_NVML_DEV_DIR"] = str(eagle.dev)
    survey = nvml(PEER_MIB=771)
    listed = [[row["pid"] for row in gpu["processes"]] for gpu in survey]
    assert listed == [*([eagle.titled(f"sglang::scheduler_TP{rank}")] for rank in range(3)), []]
    rows = [gpu["processes"][0]["mib"] for gpu in survey[:3]]
    # Beside the scheduler's own: main 2 MiB, detokenizer 1 MiB, two peers.
    assert [gpu["v2"] for gpu in survey] == [row + 3 + 2 * 771 for row in rows] + [0]
    assert all(row > 100000 for row in rows)


def test_every_worker_has_the_environment(eagle: Server) -> None:
    for pid, words in eagle.members().items():
        if words.startswith("sglang::"):
            got = environment(pid)
            assert (got["NCCL_ALGO"], got["NCCL_BUFFSIZE"], got["NCCL_TYPO"]) == ("Ring", "4M", "1"), words
            assert got["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and got["NCCL_CUMEM_ENABLE"] == "0"
            assert got["NCCL_NVLS_ENABLE"] == "0" and got["CUDA_VISIBLE_DEVICES"].startswith("GPU-")


def test_nccl_says_what_it_read(eagle: Server) -> None:
    head = rf"{socket.gethostname()}:{eagle.titled('sglang::scheduler_TP2')}:\d+ \[2\] NCCL INFO "
    told = re.findall(head + "(NCCL_.* set by environment.*)", eagle.log())
    assert told == [
        "NCCL_ALGO set by environment to Ring",
        "NCCL_BUFFSIZE set by environment to 4.",  # strtoll
        "NCCL_CUMEM_ENABLE set by environment to 0.",
        "NCCL_NVLS_ENABLE set by environment to 0.",
    ]


def test_the_phases_come_in_order(eagle: Server) -> None:
    whole = eagle.log()
    own = [line for line in whole.splitlines() if not re.match(r"\[[^]]* TP[12]\]|.*NCCL INFO", line)]
    phases = [
        r"server_args=ServerArgs\(model_path='",
        r"TP0\] Init torch distributed begin\.",
        r"TP0\] Init torch distributed ends\. elapsed=",
        r"TP0\] Load weight begin\. avail mem=",
        r"Multi-thread loading shards: 100% Completed \| 10/10 ",
        r"TP0\] Load weight end\. elapsed=.*type=LlamaForCausalLM, ",
        r"TP0\] Load weight begin\. avail mem=",
        r"TP0\] Load weight end\. elapsed=.*type=LlamaForCausalLMEagle3, ",
        r"TP0\] KV Cache is allocated\. dtype: torch\.bfloat16, #tokens: \d+",
        r"TP0\] Memory pool end\. avail mem=",
        r"TP0\] KV Cache is allocated\.",
        r"TP0\] Memory pool end\.",
        r"TP0\] Capture target verify CUDA graph begin\. backend=full, num_tokens_per_req=4, bs=\[1, 2, ",
        r"Capturing batches \(bs=1 avail_mem=.*100%\|█",
        r"TP0\] Capture target verify CUDA graph end\. elapsed=",
        r"TP0\] Capture draft decode CUDA graph begin\.",
        r"TP0\] Capture draft extend CUDA graph end\.",
        r"TP0\] max_total_num_tokens=\d+, chunked_prefill_size=8192, .*max_running_requests=48",
        r"Engine startup timings \(s\): load_weight=",
        r"INFO:     Uvicorn running on http://127\.0\.0\.1:",
        r'"GET /model_info HTTP/1\.1" 200 OK',
        r'"POST /generate HTTP/1\.1" 200 OK',
        r"The server is fired up and ready to roll!",
    ]
    at = 0
    for phase in phases:
        found = [i for i in range(at, len(own)) if re.search(phase, own[i])]
        assert found, f"{phase} is not in the log after line {at}\n{whole}"
        at = found[0] + 1


def test_a_generation(eagle: Server) -> None:
    status, answer = eagle.generate(100, key="secret")
    assert status == 200 and len(answer["output_ids"]) == 100 and answer["text"].startswith("word0 ")
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 100)
    assert meta["finish_reason"] == {"type": "length", "length": 100}
    assert (meta["spec_accept_length"], meta["spec_verify_ct"], meta["spec_num_correct_drafts"]) == (2.0, 50, 50)
    assert eagle.ask("/generate", {"text": ["a b", "c"], "sampling_params": {"max_new_tokens": 2}}, key="secret")[1][1][
        "meta_info"
    ]["prompt_tokens"] == 1  # fmt: skip
    assert eagle.ask("/generate", {"sampling_params": {}}, key="secret")[0] == 400
    status, stream = eagle.ask(
        "/generate", {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 6}}, key="secret"
    )
    counts = [json.loads(line[6:])["meta_info"]["completion_tokens"] for line in stream.split("\n\n")[:-2]]
    assert status == 200 and counts == [2, 4, 6] and stream.endswith("data: [DONE]\n\n")


def test_server_info_tells_asked_and_effective(eagle: Server) -> None:
    eagle.generate(100, key="secret")
    status, info = eagle.ask("/server_info", key="secret")
    state = info["internal_states"][0]
    assert status == 200 and info["version"] == "0.5.23" and info["status"] == "ready"
    assert (info["tp_size"], info["speculative_num_draft_tokens"], info["max_running_requests"]) == (3, 4, 48)
    assert info["api_key"] == "secret" and "--api-key secret" in info["launch_command"]  # as the real one does
    assert state["effective_max_running_requests_per_dp"] == 48 and state["tp_size"] == 3
    assert state["avg_spec_accept_length"] == 2.0 and state["last_gen_throughput"] > 0
    assert state["memory_usage"]["token_capacity"] == info["max_total_num_tokens"]
    assert eagle.ask("/get_server_info", key="secret")[0] == 200


def test_the_key_is_asked_for_except_for_health_and_metrics(eagle: Server) -> None:
    for path in ("/server_info", "/model_info", "/v1/models", "/flush_cache", "/v1/loads"):
        assert eagle.ask(path) == (401, {"error": "Unauthorized"})
        assert eagle.ask(path, key="wrong")[0] == 401
        assert eagle.ask(path, key="secret")[0] == 200
    assert [eagle.ask(path)[0] for path in ("/health", "/metrics", "/ready")] == [200, 200, 200]
    assert eagle.ask("/no/such", key="secret") == (404, {"detail": "Not Found"})
    assert eagle.ask("/generate", key="secret")[0] == 405


def test_figures_for_monitoring(eagle: Server) -> None:
    def value(name: str) -> float:
        return float(re.search(rf"^sglang:{name}{{.*}} (.*)$", eagle.ask("/metrics")[1], re.MULTILINE)[1])  # type: ignore[index]

    before = value("generation_tokens_total")
    eagle.generate(100, key="secret")
    assert value("generation_tokens_total") == before + 100
    assert value("num_running_reqs") == 0 and value("spec_accept_length") == 2.0
    loads = eagle.ask("/v1/loads", key="secret")[1]["loads"][0]
    assert loads["num_running_reqs"] == 0 and loads["max_running_requests"] == 48 and loads["decode_moments"][0] > 50


def test_flushing_needs_an_idle_server(eagle: Server) -> None:
    assert eagle.ask("/flush_cache", {}, key="secret")[0] == 200
    long = threading.Thread(target=eagle.generate, args=(4000,), kwargs={"key": "secret"})
    long.start()
    eagle.until(lambda: eagle.ask("/v1/loads", key="secret")[1]["loads"][0]["num_running_reqs"], "a running request")
    assert eagle.ask("/flush_cache", {}, key="secret")[0] == 400
    long.join()


def test_a_stopped_rank_stops_generation_and_not_the_figures(eagle: Server) -> None:
    rank = eagle.titled("sglang::scheduler_TP2")
    os.kill(rank, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            eagle.generate(key="secret", timeout=0.5)
        assert eagle.ask("/v1/loads", key="secret")[0] == 200
    finally:
        os.kill(rank, signal.SIGCONT)
    assert eagle.generate(key="secret")[0] == 200


def test_files_while_it_lives(eagle: Server) -> None:
    assert eagle.left() == ["sem.loky-N-N", "sem.loky-N-N", "sem.loky-N-N", "sgl_shm_mq_N_N", "sglang_loads_N_N.shm"]
    sizes = {re.sub(r"[_.-].*", "", path.name): path.stat().st_size for path in eagle.shm.iterdir()}
    assert sizes == {"sem": 32, "sgl": 25165836, "sglang": 16396}
    (loads,) = eagle.shm.glob("sglang_loads_*")
    import fcntl

    with loads.open("rb+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    stamped = next(eagle.shm.glob("sgl_shm_mq_*")).name.split("_")[3]
    assert int(stamped) == eagle.titled("sglang::scheduler_TP0")
    kinds = sorted(
        "socket" if path.is_socket() else "folder" if path.is_dir() else f"file {path.stat().st_size}"
        for path in eagle.tmp.iterdir()
    )
    assert kinds == ["file 0", "file 0", "folder", "folder", "socket", "socket", "socket"]


def test_a_killed_rank_ends_the_server(eagle: Server) -> None:
    """The last of this server's tests: main dies by its own hand, inductor pools a little later, files stay."""
    os.kill(eagle.titled("sglang::scheduler_TP1"), signal.SIGKILL)
    assert eagle.ended() == -signal.SIGKILL
    assert re.search(r"Subprocess scheduler_TP1 \(pid=\d+\) crashed with exit code -9\.", eagle.log())
    assert "SIGQUIT received." in eagle.log()
    eagle.gone()
    assert "sgl_shm_mq_N_N" in eagle.left() and "sem.loky-N-N" in eagle.left()


# -- Other lives -------------------------------------------------------------------------------------------------------


def test_without_spt_noenv_the_workers_environment_is_destroyed(server: Server, nvml) -> None:
    """And without a mask every process has a little of every GPU."""
    server.start("--tp-size 2 --base-gpu-id 1", NCCL_ALGO="Ring", NCCL_DEBUG="INFO")
    server.up()
    assert environment(server.process.pid)["NCCL_ALGO"] == "Ring"
    for title in ("sglang::scheduler_TP0", "sglang::scheduler_TP1"):
        pid = server.titled(title)
        assert Path(f"/proc/{pid}/environ").read_bytes()[:1] == b"\0"
        assert "NCCL_ALGO" not in environment(pid)
    assert server.log().count("NCCL_ALGO set by environment to Ring") == 2
    assert mapped(pid) == {"nvidia0": 2, "nvidia1": 2, "nvidia2": 3, "nvidia3": 2}
    nvml.environment["FAKE_NVML_DEV_DIR"] = str(server.dev)
    survey = nvml()
    assert [[row["pid"] for row in gpu["processes"]] for gpu in survey[::2]] == [[], [pid]]
    assert survey[0]["v2"] == survey[3]["v2"] == 5  # main 2 MiB, the others 1 each


def test_character_devices_are_opened_only(server: Server, nvml) -> None:
    """Those of the lab cannot be mapped; the stand-in NVML still knows which GPU each rank is on."""
    terminals = [os.openpty() for _ in range(2)]
    for number, (_, slave) in enumerate(terminals):
        (server.dev / f"nvidia{number}").unlink()
        (server.dev / f"nvidia{number}").symlink_to(os.ttyname(slave))
        os.close(slave)
    try:
        server.start("--tp-size 2", CUDA_VISIBLE_DEVICES="0,1", SPT_NOENV="1")
        server.up()
        ranks = [server.titled(f"sglang::scheduler_TP{rank}") for rank in (0, 1)]
        nvml.environment["FAKE_NVML_DEV_DIR"] = str(server.dev)
        listed = [{row["pid"] for row in gpu["processes"]} & server.members().keys() for gpu in nvml()[:2]]
        assert listed == [{ranks[0]}, {ranks[1]}]
        assert mapped(ranks[0]) == {}
        assert Path(f"/proc/{ranks[0]}/stat").read_text().rsplit(")", 1)[1].split()[4] == "0"  # no terminal
    finally:
        for master, _ in terminals:
            os.close(master)


def test_term_idle(server: Server) -> None:
    server.start("--skip-tokenizer-init", CUDA_VISIBLE_DEVICES="2")
    server.up()
    assert server.titled("sglang::scheduler") and mapped(server.titled("sglang::scheduler")) == {"nvidia2": 3}
    assert server.ask("/generate", {"text": "a"})[0] == 400
    assert server.generate()[1].keys() == {"output_ids", "meta_info"}
    server.process.terminate()
    assert server.ended() == 0
    for line in (
        "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
        "Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[].",
        "kill_process_tree called: parent_pid=",
    ):
        assert line in server.log()
    server.gone()
    assert server.left() == ["sglang_loads_N_N.shm"]
    assert len(list(server.tmp.iterdir())) == 5


def test_term_under_load_waits_and_goes_on_accepting(server: Server) -> None:
    server.start("--device cpu", STANDIN_TERM_EXIT="137")
    server.up()
    statuses: list[int] = []
    first = threading.Thread(target=lambda: statuses.append(server.generate(6000)[0]))
    first.start()
    server.until(lambda: server.ask("/v1/loads")[1]["loads"][0]["num_running_reqs"], "a running request")
    server.process.terminate()
    server.until_logged("Remaining number of requests 1.")
    assert server.ask("/health")[0] == 503
    statuses.append(server.generate()[0])
    assert server.process.poll() is None
    first.join()
    assert statuses == [200, 200]
    assert server.ended() == -signal.SIGKILL  # as 0.5.17 ends


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    server.start("--device cpu")
    server.up()
    with pytest.raises(TimeoutError):
        server.generate(10**9, timeout=0.3)
    server.until(lambda: not server.ask("/v1/loads")[1]["loads"][0]["num_running_reqs"], "the end of the request")


def test_wedged_it_takes_requests_and_answers_none(server: Server) -> None:
    switch = server.folder / "wedged"
    server.start("--device cpu --enable-metrics", STANDIN_WEDGE=str(switch), SGLANG_HEALTH_CHECK_TIMEOUT="0.3")
    server.up()
    switch.touch()
    with pytest.raises(TimeoutError):
        server.generate(timeout=0.3)
    assert server.ask("/metrics")[0] == 200 and server.ask("/health")[0] == 503
    with pytest.raises(TimeoutError):
        server.ask("/server_info", timeout=0.3)
    switch.unlink()
    server.until(lambda: server.ask("/health")[0] == 200, "health")


def test_killing_main_takes_all_but_the_inductor_pool_at_once(server: Server) -> None:
    server.start(f"{EAGLE} {server.folder / 'draft'}", CUDA_VISIBLE_DEVICES="0", STANDIN_POOL_LINGER="0.9")
    server.up()
    server.process.kill()
    server.process.wait()
    killed = time.monotonic()
    server.until(lambda: not any("sglang" in words.split(" ")[0] for words in server.members().values()), "the workers")
    # Its workers end at once, the pool itself still holds the nodes.
    server.until(lambda: len(server.members()) == 1, "the end of the pool's workers")
    (pool,) = server.members()
    assert descriptors(pool)["nvidia3"] == 1
    server.gone()
    assert 0.5 < time.monotonic() - killed < 10


def test_three_nodes(server: Server) -> None:
    """Rank 0 serves; the others' /health says nothing, SIGTERM does not reach them, and they end with rank 0."""
    nodes = [server, server.sibling("second"), server.sibling("third")]
    meeting = server.sibling("meeting").port
    try:
        for rank, node in enumerate(nodes):
            node.start(
                f"--device cpu --tp-size 6 --nnodes 3 --node-rank {rank} --dist-init-addr 127.0.0.1:{meeting}",
                NCCL_DEBUG="INFO",
                NCCL_ALGO="Ring",
            )
        server.up()
        for rank, node in enumerate(nodes):
            titles = sorted(words for words in node.members().values() if words.startswith("sglang::scheduler"))
            assert titles == [f"sglang::scheduler_TP{2 * rank}", f"sglang::scheduler_TP{2 * rank + 1}"]
            assert node.log().count("NCCL_ALGO set by environment to Ring") == 2
        follower = nodes[1]
        assert [follower.ask(path)[0] for path in ("/health", "/ready", "/server_info", "/v1/models")] == [
            200,
            404,
            404,
            404,
        ]
        os.kill(nodes[2].titled("sglang::scheduler_TP5"), signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            server.generate(timeout=0.3)
        os.kill(nodes[2].titled("sglang::scheduler_TP5"), signal.SIGCONT)
        assert server.generate()[0] == 200
        follower.process.terminate()
        follower.until_logged("SIGTERM received on node_rank 1; waiting for the rank-0 ShutdownReq broadcast")
        assert follower.process.poll() is None
        server.process.terminate()
        assert [node.ended() for node in nodes] == [0, 0, 0]
    finally:
        for node in nodes[1:]:
            node.end()


@pytest.mark.parametrize("then", ["hang", "die"])
def test_a_rank_that_loses_its_peer_hangs_or_dies(server: Server, then: str) -> None:
    other, meeting = server.sibling("second"), server.sibling("meeting").port
    line = f"--device cpu --tp-size 2 --nnodes 2 --dist-init-addr 127.0.0.1:{meeting} --node-rank "
    try:
        server.start(line + "0", STANDIN_PEER_LOSS=then)
        other.start(line + "1")
        server.up()
        other.process.kill()
        other.gone()
        if then == "hang":
            with pytest.raises(TimeoutError):
                server.generate(timeout=0.3)
            assert server.process.poll() is None
        else:
            assert server.generate()[0] == 0  # the connection breaks
            assert server.ended() == -signal.SIGKILL and "Connection closed by peer" in server.log()
    finally:
        other.end()


def test_a_rendezvous_port_in_use(server: Server) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server.start(f"--device cpu --nccl-port {taken.getsockname()[1]}")
        assert server.ended() == -signal.SIGKILL
    assert "torch.distributed.DistNetworkError" in server.log() and "EADDRINUSE" in server.log()


def test_a_port_in_use_is_noticed_last_and_does_not_end_it(server: Server) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.port))
        other.listen()
        server.start("--device cpu")
        server.until_logged(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {server.port})")
        server.until_logged("Waiting for application shutdown.")
        assert "Engine startup timings" in server.log()
        assert server.process.poll() is None and "Uvicorn running" not in server.log()
        server.process.terminate()
        assert server.ended() == -signal.SIGTERM


def test_term_before_it_serves_ends_it_like_any_process(server: Server) -> None:
    server.start("--device cpu", STANDIN_FAIL_AT="weight:hang")
    server.until_logged("Load weight begin.")
    server.process.terminate()
    assert server.ended() == -signal.SIGTERM
    server.gone()


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("weight:oom", "torch.OutOfMemoryError: CUDA out of memory."),
        ("dist:nccl", "torch.distributed.DistBackendError: NCCL error"),
        ("graph", "RuntimeError: told to fail at graph"),
    ],
)
def test_a_scheduler_that_fails_takes_the_server_with_it(server: Server, fault: str, line: str) -> None:
    server.start("--device cpu", STANDIN_FAIL_AT=fault)
    assert server.ended() == -signal.SIGKILL
    assert "Scheduler hit an exception: Traceback" in server.log() and line in server.log()
    assert "Received sigquit from a child process. It usually means the child failed." in server.log()
    server.gone()


def test_killed_from_outside_while_loading(server: Server) -> None:
    server.start("--device cpu", STANDIN_FAIL_AT="kv:exit137")
    assert server.ended() == -signal.SIGKILL
    server.gone()


@pytest.mark.parametrize(
    ("line", "code", "last"),
    [
        ("--tp-size x", 2, "sglang serve: error: argument --tp-size/--tensor-parallel-size: invalid int value: 'x'"),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path /no/draft",
            1,
            "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/draft'. "
            "Use `repo_type` argument if needed.",
        ),
        ("--speculative-algorithm EAGLE3 --speculative-eagle-topk 2", 1, "AssertionError"),
    ],
)
def test_what_fails_before_anything_is_started(server: Server, line: str, code: int, last: str) -> None:
    server.start(line)
    assert server.ended() == code
    assert server.log().splitlines()[-1] == last
    assert list(server.tmp.iterdir()) == list(server.shm.iterdir()) == []


def test_more_ranks_than_visible_gpus(server: Server) -> None:
    server.start("--tp-size 2", CUDA_VISIBLE_DEVICES="3")
    assert server.ended() == -signal.SIGKILL
    assert "CUDA error: invalid device ordinal" in server.log()


def test_too_little_memory_for_the_kv_cache(server: Server) -> None:
    server.start("--mem-fraction-static 0.001", CUDA_VISIBLE_DEVICES="0")
    assert server.ended() == -signal.SIGKILL
    assert (
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.001."
        in server.log()
    )


def test_the_console_script_serves_too(server: Server) -> None:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own = {"STANDIN_SHM_DIR": str(server.shm), "STANDIN_TMP_DIR": str(server.tmp), "STANDIN_SPEED": "20"}
    words = [
        "serve",
        str(server.folder / "target"),
        "--device",
        "cpu",
        "--port",
        str(server.port),
        "--model-type",
        "llm",
    ]
    with server.log_file.open("wb") as log:
        server.process = subprocess.Popen(
            [sys.executable, str(LAB / "standin/bin/sglang"), *words],
            env={**inherited, **own}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    server.up()
    assert server.ask("/model_info")[1]["model_path"] == str(server.folder / "target")
