"""The composition root: what a command runs, put together from concrete parts. Nothing else names them together.

`training`, `supervised` and `gateway` are imported one by one: a gateway without engines of its own needs no torch,
which takes seconds to import and half a gigabyte.
"""
