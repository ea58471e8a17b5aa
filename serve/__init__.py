"""The server: launch, presets, routes, access, the memory plan.

The folder is at the top of the checkout, and kt_runtime/serve is a link to it. Import its modules as kt_runtime.serve
only: Python would load a module a second time under a second name, with its own classes and state.
"""

if __name__ != "kt_runtime.serve":
    raise ImportError(f"import kt_runtime.serve, not {__name__}", name=__name__)
