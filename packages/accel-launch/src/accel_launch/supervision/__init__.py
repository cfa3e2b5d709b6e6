"""Processes that are started are watched: what they print, how they end, and that none is left behind."""
