"""A model's memory need per device and cache tier, and the machine's free memory."""
