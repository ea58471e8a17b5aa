"""What a model needs in memory, per device and tier, and what the machine has."""
