"""The first module that the fork server imports (system/forked_server.py): what it imports then is no garbage, and
collections, of more and more objects, would take a fifth of its start. `frozen_imports` is the last one.

A group of entry points is read once, for all forks: to find one, Python reads a file of each installed package.
"""

import functools
import gc
from importlib import metadata

gc.disable()
metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
