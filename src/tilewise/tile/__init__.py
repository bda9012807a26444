"""Device vocabulary: functions over tiles that create no tensors, so that Triton and Gluon kernels can both call them.

`host/` is their host side: the values of a call as kernel arguments.

Rows i are shifted by N - M unless a function says otherwise; logits inside loops are in base 2.
"""
