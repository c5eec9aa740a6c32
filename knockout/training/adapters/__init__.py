"""Token weights in other projects' training loops, by the layout of their batches.

Each module turns one project's batch into weights for its per-token losses, imports nothing of that
project, and says which of its fields it reads and at which place a label stands to its loss.
"""
