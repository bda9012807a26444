"""Are the rows of the tables of tiles the fastest on this device? `studies tune` times their neighbours."""
