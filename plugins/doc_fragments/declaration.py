# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    """What is declared of one server (module_utils/sglang/declaration.py DECLARATION_SPEC)."""

    DOCUMENTATION = r"""
options:
  declaration:
    description:
      - The server as declared. The role C(sglang_server) has each of these as C(sglang_server_NAME).
    type: dict
    required: true
    suboptions:
      model_path:
        description:
          - Folder of the model on the node, or the name of its repository.
        type: str
        required: true
      served_model_name:
        description:
          - Name under which the model is offered.
        type: str
      gpus:
        description:
          - GPUs of the server, by NVML index, UUID or PCI bus id, in this order. Empty means all of the node.
        type: list
        elements: str
        default: []
      tp_size:
        description:
          - Tensor parallelism, in GPUs.
        type: int
        default: 1
      dp_size:
        description:
          - Data parallelism, in replicas.
        type: int
        default: 1
      pp_size:
        description:
          - Pipeline parallelism, in stages.
        type: int
        default: 1
      mem_fraction_static:
        description:
          - Part of a GPU's free memory for weights and KV cache. SGLang chooses when it is not declared.
        type: float
      attention_backend:
        description:
          - Attention back end. SGLang chooses when it is not declared, differently with and without speculation.
        type: str
      host:
        description:
          - Address to listen on.
        type: str
        default: 127.0.0.1
      port:
        description:
          - HTTP port.
        type: int
        default: 30000
      api_key:
        description:
          - Key that clients need. It is kept out of the command line, of records, results and logs of this collection;
            SGLang itself writes it to its log and shows it in C(/server_info).
        type: str
      admin_api_key:
        description:
          - Key for administrative requests, kept like O(declaration.api_key).
        type: str
      speculative:
        description:
          - Speculative decoding, by the names of SGLang's arguments without C(speculative_), for example C(algorithm),
            C(draft_model_path), C(num_steps), C(eagle_topk), C(num_draft_tokens), C(adaptive).
        type: dict
        default: {}
      nccl:
        description:
          - Variables of NCCL, with or without C(NCCL_). They are checked against NCCL's own grammar.
        type: dict
        default: {}
      nccl_host:
        description:
          - Variables of NCCL of this one host. They add to and overrule O(declaration.nccl); null takes one away.
        type: dict
        default: {}
      environment:
        description:
          - More environment variables.
        type: dict
        default: {}
      args:
        description:
          - Every other argument of SGLang, by its field name (C(chunked_prefill_size)) and with its natural type.
          - True is a switch, false leaves it out, a list is several words, a dictionary is JSON.
        type: dict
        default: {}
      python:
        description:
          - The Python that has SGLang. It is looked for when it is not declared.
        type: path
      backend:
        description:
          - V(systemd) runs the server as a unit, V(process) in a session of its own without systemd.
        type: str
        choices: [systemd, process]
        default: systemd
      user:
        description:
          - Account of the server. The default is the one that runs the module.
        type: str
      stall_timeout:
        description:
          - Seconds without any token, while requests run, after which a server counts as wedged.
        type: float
        default: 120.0
      ready_timeout:
        description:
          - Seconds that the server may take to become ready.
        type: float
        default: 900.0
      stop_timeout:
        description:
          - Seconds from TERM to KILL when systemd stops the server.
        type: float
        default: 30.0
"""
