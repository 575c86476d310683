# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What SGLang's resolver enforces and fills in, as far as a declaration of ours can meet it.

Source: sglang 0.5.23, srt/arg_groups/ (speculative_hook.py, validation_hook.py, serving_hook.py, memory_hook.py). The
messages and the kinds of errors are its own; defaults are those of one H200.
"""

from __future__ import annotations

import json
import logging
import os
import random

logger = logging.getLogger(__name__)

EAGLE_FAMILY = ("EAGLE", "EAGLE3", "STANDALONE", "FROZEN_KV_MTP")
ALGORITHMS = (*EAGLE_FAMILY, "NEXTN", "NGRAM", "DFLASH", "DSPARK", "UNO")
ADAPTIVE_STEPS = [0, 1, 3, 5, 7]
NOT_A_REPOSITORY = (
    "Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{}'. Use `repo_type` argument if needed."
)


def read_model(path):
    """config.json of a model folder; the errors are those of the Hugging Face libraries without a network."""
    if not os.path.isdir(path):
        if path.count("/") > 1 or path.startswith(("/", ".")):
            raise OSError(NOT_A_REPOSITORY.format(path))
        raise OSError(
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached "
            f"files.\nCheck your internet connection or see how to run the library in offline mode. ({path})"
        )
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        raise OSError(
            f"{path} does not appear to have a file named config.json. "
            f"Checkout 'https://huggingface.co/{path}/tree/main' for available files."
        ) from None
    except ValueError:
        raise OSError(f"It looks like the config file at '{path}/config.json' is not a valid JSON file.") from None


def resolve(cfg):
    """Resolved values out of raw ones. Raises what the real resolver raises."""
    if cfg["enable_dp_attention"]:
        if cfg["attn_dp_size"] == 1:
            cfg["attn_dp_size"], cfg["dp_size"] = cfg["dp_size"], 1
        cfg["enable_dp_attention"] = False
    if cfg["model_path"].lower() in ("none", "dummy"):
        cfg["device"] = cfg["device"] or "cuda"
        return cfg
    cfg["tokenizer_path"] = cfg["tokenizer_path"] or cfg["model_path"]
    cfg["served_model_name"] = cfg["served_model_name"] or cfg["model_path"]
    cfg["device"] = (cfg["device"] or "cuda").split(":")[0]
    if cfg["random_seed"] is None:
        cfg["random_seed"] = random.randint(0, 1 << 30)
    cfg["mm_process_config"] = cfg["mm_process_config"] or {}
    model = read_model(cfg["model_path"])
    if cfg["speculative_algorithm"] is not None:
        cfg["speculative_algorithm"] = cfg["speculative_algorithm"].upper()
    explicit_attention = cfg["attention_backend"]
    if cfg["chunked_prefill_size"] is None:
        cfg["chunked_prefill_size"] = 8192
    if cfg["mem_fraction_static"] is None:
        cfg["mem_fraction_static"] = 0.88 if cfg["tp_size"] < 4 else 0.86
    if cfg["page_size"] is None:
        cfg["page_size"] = 1
    if cfg["pp_size"] > 1:
        cfg["disable_overlap_schedule"] = True
    if explicit_attention is None:
        tree = cfg["speculative_algorithm"] is not None and (cfg["speculative_eagle_topk"] or 4) > 1
        cfg["attention_backend"] = "torch_native" if cfg["device"] == "cpu" else "flashinfer" if tree else "fa3"
    cfg["sampling_backend"] = cfg["sampling_backend"] or ("pytorch" if cfg["device"] == "cpu" else "flashinfer")
    cfg["grammar_backend"] = cfg["grammar_backend"] or "xgrammar"
    resolve_speculation(cfg, model)
    cfg["cuda_graph_config"] = graphs(cfg)
    return cfg


def resolve_speculation(cfg, model):
    draft = cfg["speculative_draft_model_path"]
    if draft is not None:
        cfg["speculative_draft_model_revision"] = cfg["speculative_draft_model_revision"] or "main"
        read_model(draft)
    if cfg["speculative_algorithm"] in ("NEXTN", "EAGLE"):
        cfg["speculative_algorithm"] = "EAGLE"
    algorithm = cfg["speculative_algorithm"]
    if cfg["speculative_use_block_verification"]:
        if algorithm not in ("EAGLE", "EAGLE3", "DFLASH", "DSPARK"):
            raise ValueError(
                "--speculative-use-block-verification only supports EAGLE / EAGLE3 / NEXTN / DFLASH / DSPARK."
            )
        if cfg["device"] != "cuda":
            raise ValueError("--speculative-use-block-verification only supports CUDA or ROCm.")
        cfg["speculative_use_rejection_sampling"] |= algorithm in ("EAGLE", "EAGLE3")
    window, sink = cfg["speculative_draft_window_size"], cfg["speculative_draft_sink_size"]
    if window is not None and window <= 0:
        raise ValueError(f"--speculative-draft-window-size must be positive, got {window}.")
    if sink is not None and sink < 0:
        raise ValueError(f"--speculative-draft-sink-size must be non-negative, got {sink}.")
    if sink is not None and window is None:
        raise ValueError("--speculative-draft-sink-size requires --speculative-draft-window-size.")
    if algorithm is None:
        return
    if algorithm not in ALGORITHMS:
        raise ValueError(f"Unknown speculative algorithm name: {algorithm}")
    if cfg["speculative_adaptive"]:
        resolve_adaptive(cfg)
    if algorithm in EAGLE_FAMILY:
        resolve_eagle(cfg, (model.get("architectures") or [""])[0])
    elif cfg["max_running_requests"] is None:
        cap_requests(cfg)


def cap_requests(cfg):
    cfg["max_running_requests"] = 48
    logger.warning(
        "Max running requests is reset to 48 for speculative decoding. "
        "You can override this by explicitly setting --max-running-requests."
    )


def resolve_adaptive(cfg):
    reason = None
    if cfg["speculative_algorithm"] not in ("EAGLE", "EAGLE3"):
        reason = f"speculative_algorithm={cfg['speculative_algorithm']} is not EAGLE or EAGLE3"
    elif cfg["speculative_eagle_topk"] not in (None, 1):
        reason = f"speculative_eagle_topk={cfg['speculative_eagle_topk']} is not 1"
    if reason:
        logger.warning("speculative_adaptive disabled: %s. Falling back to static speculative params.", reason)
        cfg["speculative_adaptive"] = False
        return
    steps = ADAPTIVE_STEPS
    if cfg["speculative_adaptive_config"]:
        with open(cfg["speculative_adaptive_config"], encoding="utf-8") as file:
            steps = sorted(
                {n for entry in json.load(file).values() if isinstance(entry, dict) for n in entry["candidate_steps"]}
            )
    cfg["speculative_eagle_topk"] = 1
    if cfg["speculative_num_steps"] is None:
        cfg["speculative_num_steps"] = steps[len(steps) // 2]
    if cfg["speculative_num_steps"] not in steps:
        raise ValueError(
            f"--speculative-num-steps={cfg['speculative_num_steps']} is not in the adaptive config candidate_steps "
            f"{steps}. Pass one of those values."
        )
    cfg["speculative_num_draft_tokens"] = cfg["speculative_num_steps"] + 1


def resolve_eagle(cfg, architecture):
    if cfg["speculative_algorithm"] == "STANDALONE" and cfg["attn_dp_size"] > 1:
        raise ValueError("Currently standalone speculative decoding does not support dp attention.")
    if cfg["max_running_requests"] is None:
        cap_requests(cfg)
    if cfg["enable_mixed_chunk"] and cfg["speculative_algorithm"] not in ("EAGLE", "EAGLE3"):
        cfg["enable_mixed_chunk"] = False
    if not cfg["speculative_adaptive"] and cfg["speculative_num_steps"] is None:
        assert cfg["speculative_eagle_topk"] is None and cfg["speculative_num_draft_tokens"] is None
        tree = architecture in ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
        chosen = (5, 4, 8) if tree and cfg["speculative_algorithm"] != "STANDALONE" else (3, 1, 4)
        cfg["speculative_num_steps"], cfg["speculative_eagle_topk"], cfg["speculative_num_draft_tokens"] = chosen
    backends = (cfg["attention_backend"], cfg["prefill_attention_backend"], cfg["decode_attention_backend"])
    if "trtllm_mha" in backends and cfg["speculative_eagle_topk"] > 1:
        raise ValueError("trtllm_mha backend only supports topk = 1 for speculative decoding.")
    if cfg["speculative_use_rejection_sampling"]:
        check_rejection_sampling(cfg)
    if cfg["speculative_eagle_topk"] == 1 and cfg["speculative_num_draft_tokens"] != cfg["speculative_num_steps"] + 1:
        logger.warning(
            "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when speculative_eagle_topk == 1"
        )
        cfg["speculative_num_draft_tokens"] = cfg["speculative_num_steps"] + 1
    trees = ("flashinfer", "fa3", "triton")
    if cfg["speculative_eagle_topk"] > 1 and cfg["page_size"] > 1 and cfg["attention_backend"] not in trees:
        raise ValueError(
            f"speculative_eagle_topk > 1 with page_size > 1 is only supported on {trees}; got attention_backend="
            f"{cfg['attention_backend']!r}. Use page_size == 1 or one of those backends."
        )


def check_rejection_sampling(cfg):
    flag = "--speculative-use-rejection-sampling"
    if cfg["speculative_algorithm"] not in ("EAGLE", "EAGLE3"):
        raise NotImplementedError(
            f"{flag} is only supported for EAGLE / EAGLE3 / NEXTN, not "
            f"speculative_algorithm={cfg['speculative_algorithm']}."
        )
    if cfg["speculative_eagle_topk"] != 1:
        raise ValueError(f"{flag} requires --speculative-eagle-topk=1.")
    if cfg["speculative_accept_threshold_single"] != 1.0 or cfg["speculative_accept_threshold_acc"] != 1.0:
        raise ValueError(
            f"{flag} is incompatible with --speculative-accept-threshold-single / --speculative-accept-threshold-acc; "
            "rejection sampling ignores the accept thresholds."
        )


def graphs(cfg):
    """Batch sizes that are captured: up to 256 (512 from four GPUs on), and no more than may run."""
    wanted = cfg["cuda_graph_config"] or {}
    phases = {}
    for phase in ("decode", "prefill"):
        entry = dict(wanted.get(phase, {}))
        entry["backend"] = cfg[f"cuda_graph_backend_{phase}"] or entry.get("backend") or "full"
        if cfg["disable_cuda_graph"] or cfg[f"disable_{phase}_cuda_graph"] or cfg["device"] == "cpu":
            entry["backend"] = "disabled"
        phases[phase] = entry
    top = cfg["cuda_graph_max_bs_decode"] or phases["decode"].get("max_bs") or (256 if cfg["tp_size"] < 4 else 512)
    top = min(top, cfg["max_running_requests"] or top)
    sizes = cfg["cuda_graph_bs_decode"] or phases["decode"].get("bs")
    if not sizes:
        if cfg["speculative_algorithm"] is None:
            sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16)]
        else:
            sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 513, 16)]
        sizes = [size for size in sizes if size <= top]
    phases["decode"].update(max_bs=top, bs=sizes)
    return phases


def check(cfg):
    """ServerArgs.check_server_args()."""
    assert (cfg["tp_size"] * cfg["pp_size"]) % cfg["nnodes"] == 0, "tp_size must be divisible by number of nodes"
    assert not (cfg["disable_cuda_graph_padding"] and cfg["enable_torch_compile"]), (
        "--disable-cuda-graph-padding is incompatible with --enable-torch-compile. "
        "Remove --disable-cuda-graph-padding or --enable-torch-compile."
    )
    if cfg["pp_size"] > 1 and cfg["speculative_algorithm"] is not None:
        assert cfg["speculative_algorithm"] == "EAGLE" and not cfg["enable_multi_layer_eagle"], (
            "Pipeline parallelism currently only supports EAGLE (non-multi-layer) speculative decoding"
        )
        assert cfg["disaggregation_mode"] == "prefill" or os.environ.get("SGLANG_ENABLE_PP_SPEC"), (
            "PP + speculative decoding (MTP) is only supported on prefill nodes (disaggregation-mode=prefill)"
        )
    assert not (cfg["dp_size"] > 1 and cfg["nnodes"] != 1), (
        "multi-node data-parallel replicas are not supported; use attention DP (--attn-dp-size) across nodes"
    )
    assert cfg["base_gpu_id"] >= 0, "base_gpu_id must be non-negative"
    assert cfg["gpu_id_step"] >= 1, "gpu_id_step must be positive"
    assert cfg["moe_dense_tp_size"] in (None, 1, cfg["tp_size"]), (
        "moe_dense_tp_size only supports None, 1, or tp_size currently"
    )
    assert ":" not in (cfg["served_model_name"] or ""), (
        "served_model_name cannot contain a colon (':') character. The colon is reserved for the 'model:adapter' "
        f"syntax used in LoRA adapter specification. Invalid value: '{cfg['served_model_name']}'"
    )
    if (cfg["chunked_prefill_size"] or 0) > 0 and cfg["disaggregation_mode"] != "decode":
        assert cfg["chunked_prefill_size"] % (cfg["page_size"] or 1) == 0, (
            "chunked_prefill_size must be divisible by page_size"
        )
    assert cfg["tokenizer_worker_num"] > 0, "Tokenizer worker num must >= 1"
    assert cfg["detokenizer_worker_num"] > 0, "Detokenizer worker num must >= 1"
    if cfg["enable_priority_scheduling"]:
        assert cfg["schedule_policy"] in ("fcfs", "lof"), (
            f"To use priority scheduling, schedule_policy must be 'fcfs' or 'lof'. '{cfg['schedule_policy']}' is not "
            "supported."
        )
    assert cfg["schedule_conservativeness"] >= 0, "schedule_conservativeness must be non-negative"
