"""Hold any engine to the reference: fuzz its functions, and find which factor decides where they fail.

``fuzz.conform`` and ``isolate.isolate`` are what ``ddtree conform`` and ``ddtree isolate`` run;
``suite.Conformance`` is a pytest class to subclass. They need the ``fuzz`` extra; this module does not.
"""

from ddtree.invariants.conformance.backend import FUNCTIONS, Backend, Refused

__all__ = ["FUNCTIONS", "Backend", "Refused"]
