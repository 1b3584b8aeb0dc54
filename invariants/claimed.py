"""The address formulas, for numbers that a call claims.

A checker asks what would follow if a number were a width or a prefix length. Which it is, is what it has
to find out, so here the formulas take plain ints, where ``ddtree.spec.index`` tells types apart.
"""

from typing import Any

from ddtree.spec import index as typed

index: Any = typed
