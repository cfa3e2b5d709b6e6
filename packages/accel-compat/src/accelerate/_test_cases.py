"""Classes of tests that clean up after themselves."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path
from typing import ClassVar
from unittest import mock

from accel_core.state import reset_all


class TempDirTestCase(unittest.TestCase):
    """Tests with a folder of their own, `tmpdir`, which goes when the last one has ended."""

    clear_on_setup: ClassVar[bool] = True
    tmpdir: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """Make the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Delete the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder, if it is to be empty."""
        if not self.clear_on_setup:
            return
        for entry in self.tmpdir.iterdir():
            if entry.is_dir() and not entry.is_symlink():  # what a link leads to stays
                shutil.rmtree(entry)
            else:
                entry.unlink()


class AccelerateTestCase(unittest.TestCase):
    """Tests after each of which the process knows nothing of its run."""

    def tearDown(self) -> None:
        """Forget the run."""
        super().tearDown()
        reset_all()


class MockingTestCase(unittest.TestCase):
    """Tests that replace things for as long as one runs."""

    def add_mocks(self, mocks: mock.Mock | list[mock.Mock]) -> None:
        """Start patches now, and stop them after the test."""
        for each in mocks if isinstance(mocks, (tuple, list)) else [mocks]:
            each.start()
            self.addCleanup(each.stop)
