"""The back end for Hopper (sm_90): Gluon kernels, asynchronous and warp-specialised."""
