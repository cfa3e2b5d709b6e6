"""Checkpoints in object stores: what lies at an address, and how it gets there whole or not at all.

At an address `s3://bucket/run/7` lie:

    accel_commit-00000002.json       the commit: which save counts, and the digest of its manifest
    00000002-<id>/                   the files of that save, in the layout of a folder of `save_state`
        accel_manifest.json          their sizes and digests

Every save has a folder of its own, numbered one above the commit that it found. All files are written, then the
manifest, then the commit, by a put that fails where the name is taken. Readers believe the commit with the highest
number, and nothing without one. So a save that ends anywhere leaves the old checkpoint or the new one, and of two
writers the second is refused. After its commit a save deletes the commits before it, then their folders, and folders
of its own number or below: their saves can no longer commit.
"""

from __future__ import annotations
