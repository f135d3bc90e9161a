"""Energy and money of a step, from power, traffic and prices.

A chip takes the power of its data sheet while it computes. What it takes while it waits, and what
a byte costs on its way, is assumed: orders of magnitude from data sheets of links, not measured.
Hosts, cooling and storage are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.cost.sent import Reach, Way

WAITING = 0.35
"""Part of a chip's power while it waits for others. Assumed: its clocks and its memory stay up."""

JOULES_PER_BYTE: Mapping[Reach, float] = {"node": 80e-12, "across": 800e-12}
"""Assumed. Inside a node 10 pJ a bit: serial links on a board, switch included. Between nodes
100 pJ a bit: two adapters of 25 W and four optical ends of 12 W at 400 Gbit/s, and a switch."""


def traffic_joules(sent: Mapping[Way, float]) -> float:
    """Of all bytes on their way."""
    return sum(JOULES_PER_BYTE[way.reach] * num_bytes for way, num_bytes in sent.items())
