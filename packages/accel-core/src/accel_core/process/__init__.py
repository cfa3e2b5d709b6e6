"""The process and its fellows: who they are, how they meet, who goes first."""
