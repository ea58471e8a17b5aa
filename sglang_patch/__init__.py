"""The plugin: the only code that knows the internals of SGLang.

The folder lies at the top of the checkout; kt_runtime/sglang_patch is a symbolic link to it. Importing it under a
second name would load its modules twice, with duplicate classes and state, so only the name in kt_runtime is allowed.
"""

if __name__ != "kt_runtime.sglang_patch":
    raise ImportError(f"import kt_runtime.sglang_patch, not {__name__}", name=__name__)
