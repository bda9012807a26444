"""Device code that the forward and the backward share: channels, the queue of tiles, scores, dropout's bits."""
