"""Ranks: processes that compute one model together, each with a share of its heads, outputs and experts.

Every rank gets the same input rows and computes some columns of each product; which columns do not change their bits.
The ranks exchange columns and rows, never partial sums: a sum has the order of one rank. So results are equal to those
of one process, bit for bit. How processes are started and connected is the serving engine's matter (`sglang_patch`).
"""

from kt_runtime.ranks.connections import sockets_of
from kt_runtime.ranks.exchange import Exchange
from kt_runtime.ranks.experts import SharedExperts, TrainedExperts
from kt_runtime.ranks.hashing_group import HashingGroup
from kt_runtime.ranks.native import shared_memory_of
from kt_runtime.ranks.share import Pieces, Share

__all__ = [
    "Exchange",
    "HashingGroup",
    "Pieces",
    "Share",
    "SharedExperts",
    "TrainedExperts",
    "shared_memory_of",
    "sockets_of",
]
