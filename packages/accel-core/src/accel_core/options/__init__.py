"""What can be configured: one line per option, and the enumerations their values come from. Imports no torch."""
