"""The first module that the fork server imports (system/forked_server.py): what it imports then is no garbage, and
collections, of more and more objects, would take a fifth of its start. `frozen_imports` is the last one.
"""

import gc

gc.disable()
