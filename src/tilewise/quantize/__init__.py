"""Q, K and V in 8 bits."""
