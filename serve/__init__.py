"""The server: launch, presets, routes, access, the memory plan.

The folder stands at the top of the checkout, and kt_runtime/serve is a link to it. Under a second name
its modules would be loaded twice, with classes and state of their own, so the name in kt_runtime is the only one.
"""

if __name__ != "kt_runtime.serve":
    raise ImportError(f"import kt_runtime.serve, not {__name__}", name=__name__)
