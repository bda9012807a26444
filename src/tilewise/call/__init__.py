"""A call as data, and the way to it: options, checks, the Problem, back ends, calls seen before."""
