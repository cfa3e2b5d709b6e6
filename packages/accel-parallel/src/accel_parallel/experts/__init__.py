"""Expert parallel: ranks that each hold some experts of every mixture, and send one another the tokens for them.

Its modules load torch's `DTensor`; a strategy imports them when a mesh has the axis.
"""
