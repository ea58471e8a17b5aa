"""The trainer: recipes, data and the training loop. It talks to the resident over the wire.

The folder is at the top of the checkout; kt_runtime/train is a link to it. Imported under a second name, its modules
would be loaded twice, with their own classes and state, so kt_runtime.train is the only name.
"""

if __name__ != "kt_runtime.train":
    raise ImportError(f"import kt_runtime.train, not {__name__}", name=__name__)
