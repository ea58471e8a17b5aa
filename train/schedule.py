"""Learning rate over optimizer steps: `transformers.get_scheduler`, so that all its names mean what users know."""

from __future__ import annotations

import math

from kt_runtime.train.recipe import Recipe


def num_steps(recipe: Recipe, num_examples: int) -> int:
    """Optimizer steps of the whole run. A last, smaller batch of an epoch is a step as well."""
    per_step = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    if recipe.max_steps > 0:
        return recipe.max_steps
    return max(1, math.ceil(math.ceil(num_examples / per_step) * recipe.num_train_epochs))


def learning_rates(recipe: Recipe, steps: int) -> list[float]:
    """One rate per optimizer step, as a Hugging Face trainer would use them."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe.learning_rate)
    warmup = recipe.warmup_steps or math.ceil(steps * recipe.warmup_ratio)
    schedule = get_scheduler(recipe.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates
