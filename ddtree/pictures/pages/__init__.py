"""Pages that people look at: one HTML file each, with nothing to load from anywhere.

``call`` shows a captured call, ``conformance`` a run of ``ddtree conform``, ``isolation`` one of
``ddtree isolate``, ``trace`` a generation round by round. ``page`` is what they have in common, ``markup``
how they are written.
"""
