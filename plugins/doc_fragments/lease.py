# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    """Who may change this node (common/spec.py LEASE_SPEC)."""

    DOCUMENTATION = r"""
options:
  lease:
    description:
      - Id of the playbook run on whose behalf this is done, for example from P(cleanslate.inference.run_id#lookup).
      - Every change is refused while another run's lease stands.
      - Without an id the module holds a lease only while it works.
    type: str
  lock_timeout:
    description:
      - Seconds to wait for another run's lease or lock to go.
    type: float
    default: 0.0
"""
