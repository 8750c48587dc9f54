"""`Program`: replayed, printed, lowered to a graph module, described, saved."""
