"""Suites that a third party subclasses to show that its part fits: strategies, trackers, devices."""
