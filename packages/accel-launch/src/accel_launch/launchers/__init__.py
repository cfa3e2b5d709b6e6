"""Ways of starting processes, one file each, behind one small interface."""
