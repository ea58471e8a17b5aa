"""Routes: which experts the server's router chose for each token it computed. Kept for training's routing replay."""
