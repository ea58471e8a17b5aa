"""The training objectives: SFT, preference training and reinforcement learning, each as the calls and the loss of a
step."""
