# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

from hypothesis import settings

# No deadline for one example: a busy machine is no failure. No folder of examples in the checkout.
settings.register_profile("proc", deadline=None, database=None, max_examples=60)
settings.load_profile("proc")
