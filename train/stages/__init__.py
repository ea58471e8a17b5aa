"""What one step of SFT or a preference loss trains on."""
