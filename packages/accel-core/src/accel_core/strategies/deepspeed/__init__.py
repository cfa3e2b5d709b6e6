"""DeepSpeed's ZeRO as a strategy: one engine for each model that is trained."""
