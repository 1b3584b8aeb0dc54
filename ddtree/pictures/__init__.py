"""Pictures of one request of one verify pass: its draft tree, its mask, its accepted path.

``view`` gathers what is drawn, ``text`` draws it in a terminal, ``plot`` as PNG and SVG.
"""

from ddtree.pictures.view import TreeView, view_of

__all__ = ["TreeView", "view_of"]
