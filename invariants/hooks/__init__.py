"""Hooks for running servers: an engine's own metadata as calls, held to the table in the engine's process.

``ddtree.hooks`` is what engines and programs import: it does nothing while ``DDTREE_DEBUG`` is unset.
"""
