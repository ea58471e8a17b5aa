"""Rollouts of reinforcement learning: answers sampled over SGLang's HTTP, their rewards and advantages."""
