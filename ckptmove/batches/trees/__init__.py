"""Local and remote trees, and the ledger that records which items are done."""
