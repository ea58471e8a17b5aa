"""The plugin: the only code that knows the internals of SGLang.

The folder stands at the top of the checkout, and kt_runtime/sglang_patch is a link to it. Under a second name
its modules would be loaded twice, with classes and state of their own, so the name in kt_runtime is the only one.
"""

if __name__ != "kt_runtime.sglang_patch":
    raise ImportError(f"import kt_runtime.sglang_patch, not {__name__}", name=__name__)
