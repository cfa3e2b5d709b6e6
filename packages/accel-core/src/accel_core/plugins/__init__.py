"""What a user configures: plain mutable dataclasses, read when objects are prepared.

A field left at `None` is filled from its option's environment variable, then from its default, when the plugin is made.
"""
