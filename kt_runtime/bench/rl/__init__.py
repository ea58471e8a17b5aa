"""`kt-runtime bench rl`: steps of reinforcement learning through a real server, and where their time goes."""
