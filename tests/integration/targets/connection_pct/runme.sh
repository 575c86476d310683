#!/usr/bin/env bash
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

set -eux

# With and without files in the container, for the hosts of the group connection_contract.
for pipelining in true false; do
    ansible-playbook -i "${INVENTORY_PATH}" contract.yml -e "ansible_pipelining=${pipelining}" "$@"
done
