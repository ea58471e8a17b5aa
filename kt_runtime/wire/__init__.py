"""The training protocol and the names channel over ZMQ: messages, codec, the server, and three clients.

They differ in how they wait. `ResidentClient` blocks its thread, keeps the order of requests and retries: for trainers
and users' Python. `AsyncResidentClient` awaits and retries, in any order: for the frontend's event loop, on which other
requests run. `NamesChannel` is polled by the scheduler between two batches and sends each move once, since a retry
could arrive after a later move. `ticket.py` has what they share: a request in flight and which reply is its own.
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
