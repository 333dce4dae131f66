"""How many buckets travel at a time; which way each goes is up to :mod:`.plan.ways`."""

from __future__ import annotations

#: Buckets that travel at a time: it bounds the memory for what is sent and received.
MAX_UNDER_WAY = 2
