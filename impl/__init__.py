"""The fast path: a round on the device in Triton, same names and results as ``ddtree.spec``."""
