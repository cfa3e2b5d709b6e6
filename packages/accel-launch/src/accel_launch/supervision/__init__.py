"""Watches the started processes: what they print, how they end, and that none is left behind."""
