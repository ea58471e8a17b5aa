"""Datasets in LLaMA-Factory's form: `dataset_info.json` next to files of rows in its formats.

Every error names file:line. docs/datasets.md lists which rows are left out and how that is reported.
"""

from kt_runtime.train.data.conversations import Conversation, Message, Preference, Question
from kt_runtime.train.data.reading import read_all_that_can_be, read_datasets, read_named

__all__ = ["Conversation", "Message", "Preference", "Question", "read_all_that_can_be", "read_datasets", "read_named"]
