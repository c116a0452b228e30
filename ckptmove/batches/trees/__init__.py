"""Trees on disk and in stores, and the ledger of what is done in one."""
