"""The trainer: recipes, data and the training loop. It talks to the resident over the wire.

The folder stands at the top of the checkout, and kt_runtime/train is a link to it. Under a second name
its modules would be loaded twice, with classes and state of their own, so the name in kt_runtime is the only one.
"""

if __name__ != "kt_runtime.train":
    raise ImportError(f"import kt_runtime.train, not {__name__}", name=__name__)
