"""Share device code between forward and backward: channels, the queue of tiles, scores, dropout bits."""
