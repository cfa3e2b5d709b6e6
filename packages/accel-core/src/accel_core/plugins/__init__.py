"""What a user configures: plain mutable dataclasses, read when objects are prepared.

A field left at `None` takes its value from its option's environment variable, or else its default, when the plugin is
created.
"""
