"""The command line: ``ddtree generate``, ``demo``, ``check``, ``dump`` and ``show``.

One file a verb. Heavy packages are imported inside the verbs, so that ``--help`` is quick.
"""
