"""Compute over tiles on the device: functions that create no tensors, so that Triton and Gluon kernels can both call
them.

`host/` is their host side: it turns the values of a call into kernel arguments.

Rows i are shifted by N - M unless a function says otherwise; logits inside loops are in base 2.
"""
