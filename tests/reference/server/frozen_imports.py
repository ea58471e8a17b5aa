"""The last module that the fork server imports (system/forked_server.py): garbage collection leaves what it has so far.

A server collects before it starts its processes. In a fork, each object that a collection visits costs a copy of the
page of memory that the object lies in: of two million imported objects that was a third of a server's start.
"""

import gc

gc.collect()
gc.freeze()
