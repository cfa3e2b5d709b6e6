"""How models, optimizers and gradients live across processes: one file or folder per way."""
