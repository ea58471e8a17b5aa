"""DPO's loss by TRL 1.16's own code (`DPOTrainer._compute_loss`), bound to a stand-in for its trainer.

TRL has no loss functions to import; what the method asks of its trainer and its model is little enough to stand in for.
TRL 1.16 has no label smoothing in `sigmoid`, and no orpo and simpo here: those are checked by hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch


def dpo_loss(
    logprobs: Sequence[torch.Tensor],
    counted: Sequence[torch.Tensor],
    reference: np.ndarray,
    kind: str,
    beta: float,
) -> torch.Tensor:
    """The mean over pairs. Sequences 2 i and 2 i + 1 are chosen and rejected; `counted`: which of its targets count.

    TRL's model puts the chosen sequences first, pads on the right, and gives no log-probability for the first token.
    """
    from trl.trainer.dpo_trainer import DPOTrainer

    order = [*range(0, len(logprobs), 2), *range(1, len(logprobs), 2)]
    longest = max(map(len, logprobs))
    per_token = torch.stack([torch.nn.functional.pad(logprobs[i], (0, longest - len(logprobs[i]))) for i in order])
    mask = torch.zeros(len(order), longest + 1, dtype=torch.long)
    for row, i in enumerate(order):
        mask[row, 1 : 1 + len(counted[i])] = counted[i].long()
    empty = torch.zeros(len(order), longest)
    outputs = SimpleNamespace(log_probs=per_token * mask[:, 1:], entropy=empty, mean_logits=empty, is_top1=empty.bool())
    chosen, rejected = torch.from_numpy(reference.astype(np.float64)).to(per_token.dtype).view(-1, 2).unbind(1)
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return DPOTrainer._compute_loss(cast(DPOTrainer, _trainer(kind, beta)), lambda **_: outputs, inputs, False)


def _trainer(kind: str, beta: float) -> SimpleNamespace:
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
        _total_train_tokens=0,
        _metrics={"eval": defaultdict(list)},
    )
