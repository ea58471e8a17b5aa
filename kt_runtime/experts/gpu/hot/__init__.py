"""Hot experts: the most used experts of each layer are on the device too, and compute there."""
