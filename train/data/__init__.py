"""Datasets as LLaMA-Factory's users have them: `dataset_info.json` beside files of rows in its formats.

Every error names file:line; which rows are left out, and that they are said, is in docs/datasets.md.
"""

from kt_runtime.train.data.conversations import Conversation, Message, Preference
from kt_runtime.train.data.reading import read_all_that_can_be, read_datasets, read_named

__all__ = ["Conversation", "Message", "Preference", "read_all_that_can_be", "read_datasets", "read_named"]
