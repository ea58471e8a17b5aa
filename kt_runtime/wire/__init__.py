"""The training protocol and the names channel over ZMQ: messages, codec, the server, and the clients of trainer,
frontend and resident.
"""

from kt_runtime.wire.address import runtime_directory
from kt_runtime.wire.batch import Batch, Samples
from kt_runtime.wire.client import ForwardResult, ResidentClient
from kt_runtime.wire.failures import error_from, error_reply
from kt_runtime.wire.messages import CrossEntropy, LoraSettings, Loss, PolicyLoss, PreferenceLoss
from kt_runtime.wire.server import Incoming, WireServer
from kt_runtime.wire.ticket import Ticket

__all__ = [
    "Batch",
    "CrossEntropy",
    "ForwardResult",
    "Incoming",
    "LoraSettings",
    "Loss",
    "PolicyLoss",
    "PreferenceLoss",
    "ResidentClient",
    "Samples",
    "Ticket",
    "WireServer",
    "error_from",
    "error_reply",
    "runtime_directory",
]
