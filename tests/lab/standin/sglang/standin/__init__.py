# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the stand-in does what the real server does, one thing a file. Nothing here has a counterpart in sglang."""
