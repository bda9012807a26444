"""The back end for Hopper (sm_90), in Gluon."""
